"""Faults of model families."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        "Qwen3-Next's fused projections cut as if they were not interleaved",
        "models/qwen3_next.py",
        "mx.split(tensor.reshape(heads, sum(rows), *rest), list(accumulate(rows))[:-1], axis=1)",
        "mx.split(tensor[None], [heads * end for end in accumulate(rows)][:-1], axis=1)",
        "tests/models/test_families.py -k qwen3_next",
    ),
    Fault(
        "Qwen3-Next's betas and decays swapped",
        "models/qwen3_next.py",
        'found[name.replace("_ba.", "_b.")], found[name.replace("_ba.", "_a.")] =',
        'found[name.replace("_ba.", "_a.")], found[name.replace("_ba.", "_b.")] =',
        "tests/models/test_families.py -k qwen3_next",
    ),
    Fault(
        "Qwen3-Next's weights of experts always made to sum to 1",
        "models/qwen3_next.py",
        'bool(config.get("norm_topk_prob", True))',
        "True",
        "tests/models/test_families.py -k qwen3_next",
    ),
    Fault(
        "Qwen3-Next's list of dense layers ignored",
        "models/qwen3_next.py",
        "if layer in listed or (layer + 1) % step",
        "if (layer + 1) % step",
        "tests/models/test_families.py -k qwen3_next",
    ),
    Fault(
        "Qwen3-Next's head dense like the first layer",
        "models/qwen3_5.py",
        'DecoderLayer(args, "full_attention", None)',
        'DecoderLayer(args, "full_attention", 0)',
        "tests/models/test_families.py -k qwen3_next",
    ),
    Fault(
        "Qwen3.5's weights of experts not made to sum to 1",
        "models/qwen3_5_moe.py",
        "sparse_mlp(config, norm_topk_prob=True)",
        "sparse_mlp(config, norm_topk_prob=False)",
        "tests/models/test_families.py -k qwen3_5_moe",
    ),
    Fault(
        "more experts chosen than there are",
        "models/qwen3_5_moe.py",
        "if chosen > experts:",
        "if chosen > experts + 1:",
        "tests/models/test_qwen3_5_moe.py",
    ),
    Fault(
        "gate and up of experts that are stored together swapped",
        "models/experts.py",
        'kept[f"{before}.gate_proj.weight"], kept[f"{before}.up_proj.weight"] = mx.split',
        'kept[f"{before}.up_proj.weight"], kept[f"{before}.gate_proj.weight"] = mx.split',
        "tests/models/test_families.py -k qwen3_5_moe",
    ),
    Fault(
        "experts taken for a dense MLP where projections are put together",
        "models/qwen3_5.py",
        "if not isinstance(self.mlp, Qwen3NextMLP):",
        "if False:",
        "tests/engine/test_on_kernels.py -k experts",
    ),
]
