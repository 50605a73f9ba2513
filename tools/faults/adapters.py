"""Faults in adapters: reading, placing, and what hangs on them."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        "rank-stabilised scales are plain ones",
        "models/adapter_formats.py",
        "(math.sqrt(rank) if root else rank)",
        "rank",
        "tests/models/test_adapters.py -k scale",
    ),
    Fault(
        "a pattern of ranks matches the end of a word",
        "models/adapter_formats.py",
        r"(.*\.)?({pattern})",
        r".*({pattern})",
        "tests/models/test_adapters.py -k scale",
    ),
    Fault(
        "DoRA takes the norm of the weight alone",
        "models/adapters.py",
        "whole = self.factors(whole)[:, None] * whole",
        "whole = self.factors(weight.astype(mx.float32))[:, None] * whole",
        "tests/models/test_adapters.py -k formula",
    ),
    Fault(
        "values that are not finite are taken",
        "models/adapters.py",
        "if broken := sorted(name for name, tensor in stored.items() if not mx.isfinite(tensor).all().item()):",
        "if broken := []:",
        "tests/models/test_adapters.py -k finite",
    ),
    Fault(
        "tensors that are no part of a LoRA layer are left out",
        "models/adapters.py",
        "            strange.append(name)\n",
        "            continue\n",
        "tests/models/test_adapters.py -k nothing_is_left_out",
    ),
    Fault(
        "another rank than the configuration's is taken",
        "models/adapters.py",
        "if not a.shape[-2] == b.shape[-1] == rank:",
        "if a.shape[-2] != b.shape[-1]:",
        "tests/models/test_adapters.py -k wrong_in_a_configuration",
    ),
    Fault(
        "an adapter's digest is that of its weights alone",
        "models/adapters.py",
        "hashlib.sha256((folder / CONFIG).read_bytes() + path.read_bytes())",
        "hashlib.sha256(path.read_bytes())",
        "tests/models/test_adapters.py -k digest",
    ),
    Fault(
        "the head is adapted, too",
        "models/adapters.py",
        "ours == embedding or ours.startswith(HEAD)",
        "ours == embedding",
        "tests/models/test_adapters.py -k no_layer_of_the_trunk",
    ),
    Fault(
        "layers that the model lacks are left out",
        "models/adapter_placement.py",
        "        if self._left:\n",
        "        if not adapter.updates:\n",
        "tests/models/test_adapters.py -k deeper",
    ),
    Fault(
        "an update of another size is broadcast",
        "models/adapter_placement.py",
        "if update.shape != shape:",
        "if len(update.shape) != len(shape):",
        "tests/models/test_adapters.py -k another_size",
    ),
    Fault(
        "experts named one by one lose their scale",
        "models/adapter_placement.py",
        "update.scale * update.b for layer",
        "update.b for layer",
        "tests/models/test_adapters.py -k one_by_one",
    ),
    Fault(
        "a bias is scaled by DoRA's factors",
        "models/low_rank.py",
        'if "bias" in base:',
        'if "bias" in base and factors is None:',
        "tests/models/test_adapters.py -k bias",
    ),
    Fault(
        "joined layers share one update",
        "models/low_rank.py",
        "        done += own\n",
        "        done += 0\n",
        "tests/models/test_adapters.py -k put_together",
    ),
    Fault(
        "joined layers without an update take their neighbour's factors",
        "models/low_rank.py",
        "return mx.ones(plain.weight.shape[0], dtype=dtype)",
        "return mx.full(plain.weight.shape[0], 2, dtype=dtype)",
        "tests/models/test_adapters.py -k put_together",
    ),
    Fault(
        "few rows of an update are multiplied together",
        "models/low_rank.py",
        "if x.size // x.shape[-1] > _FEW:",
        "if x.size // x.shape[-1] > 1:",
        "tests/models/test_adapters.py -k one_by_one",
    ),
    Fault(
        "warm prefixes do not hang on the adapter",
        "keeping.py",
        '({"adapter": llm.adapter.digest} if llm.adapter else {})',
        "{}",
        "tests/test_adapted_llm.py -k disk",
    ),
    Fault(
        "what was tuned does not hang on the adapter",
        "tuned.py",
        '({"adapter": described["adapter"]["digest"]} if described["adapter"] else {})',
        "{}",
        "tests/test_adapted_llm.py -k kept",
    ),
    Fault(
        "an adapter's memory is not asked for",
        "opening.py",
        "weights + (adapter.nbytes if adapter else 0)",
        "weights",
        "tests/test_adapted_llm.py -k memory",
    ),
    Fault(
        "the server reads an adapter from the settings file",
        "server/config.py",
        "        **Settings.unstored,\n",
        "",
        "tests/test_adapted_llm.py -k file",
    ),
    Fault(
        "bench compares an adapter with itself",
        "cli/bench.py",
        'settings.model_copy(update={"adapter_path": None})',
        "settings",
        "tests/cli/test_adapter_path.py -k acceptance",
    ),
    Fault(
        "tune measures without the adapter",
        "cli/tune.py",
        "found = tuning.describe(model, adapter_path)",
        "found = tuning.describe(model)",
        "tests/cli/test_adapter_path.py -k tune",
    ),
    Fault(
        "an adapter changes every model that settings serve",
        "cli/serve.py",
        "if settings.adapter_path is not None and len(models) > 1:",
        "if False:",
        "tests/cli/test_start.py -k an_adapter_is_for",
    ),
]
