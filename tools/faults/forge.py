"""Faults of what is built of a checkpoint, and of foreign weights."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

_FOREIGN = "tests/models/test_foreign.py"
_FILE = "tests/forge/test_tensor_file.py"
_PLAN = "tests/forge/test_plan.py"
_BUILD = "tests/forge/test_build.py"
_PLACE = "tests/forge/test_workplace.py"
_COMMAND = "tests/cli/test_forge.py"
_BAD = "tests/cli/test_bad_checkpoints.py"

FAULTS = [
    Fault(
        "AWQ's columns are read in the order of their words",
        "models/foreign.py",
        "_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]",
        "_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]",
        _FOREIGN,
    ),
    Fault(
        "GPTQ's zero points are taken as they are stored",
        "models/foreign.py",
        'if _gptq_format(settings) == "gptq":',
        "if False:",
        _FOREIGN,
    ),
    Fault(
        "a borrow between GPTQ's zero points is lost",
        "models/foreign.py",
        "zeros = _as_words(zeros) + mx.array(_ONES[bits], dtype=mx.uint32)",
        "zeros = (_codes(zeros, bits) + 1).view(mx.uint32) if bits == 8 else _words(_codes(zeros, 4) + 1, 4)",
        _FOREIGN,
    ),
    Fault(
        "inputs that GPTQ sorted are taken side by side",
        "models/foreign.py",
        'groups = parts["g_idx"] if settings.get("desc_act") and scales.shape[0] > 1 else None',
        "groups = None",
        _FOREIGN,
    ),
    Fault(
        "a group of an input may be one that is not there",
        "models/foreign.py",
        "if groups.shape != (inputs,) or groups.min().item() < 0 or groups.max().item() >= count:",
        "if groups.shape != (inputs,):",
        _FOREIGN,
    ),
    Fault(
        "bits of compressed-tensors are four",
        "models/foreign.py",
        "bits = 32 * words.shape[-1] // max(shape[-1], 1)",
        "bits = 4",
        _FOREIGN,
    ),
    Fault(
        "symmetric codes have no zero point",
        "models/foreign.py",
        "zeros = mx.full(scales.shape, 1 << (bits - 1), dtype=mx.uint8)",
        "zeros = mx.zeros(scales.shape, dtype=mx.uint8)",
        _FOREIGN,
    ),
    Fault(
        "a large group's scale serves its first part alone",
        "models/foreign.py",
        'return {"weight": words, "scales": mx.repeat(scales, alike, -1), "biases": mx.repeat(biases, alike, -1)}',
        'return {"weight": words, "scales": scales, "biases": biases}',
        _FOREIGN,
    ),
    Fault(
        "settings of a quantisation are sought at the top alone",
        "models/checkpoint.py",
        "notes = _foreign_quantisation(text_config, folder)",
        "notes = _foreign_quantisation(config, folder)",
        f"{_FOREIGN} {_BAD}",
    ),
    Fault(
        "the classifier takes tensors that fit no config",
        "models/checkpoint.py",
        "if problems := describe_misfits(module, trunk):",
        "if (problems := describe_misfits(module, trunk)) and False:",
        f"{_BAD} -k probe",
    ),
    Fault(
        "whole numbers are taken for weights",
        "models/fit.py",
        "if _kind(tensors[name].dtype) != _kind(expected[name].dtype)",
        "if False",
        f"{_BAD} -k whole",
    ),
    Fault(
        "a norm may be NaN",
        "models/checkpoint.py",
        "if broken := [name for name, weight in weights.items() if not mx.isfinite(weight).all().item()]:",
        "if broken := []:",
        f"{_BAD} -k NaN",
    ),
    Fault(
        "a pickle is no more than another format",
        "models/folder.py",
        '_PICKLES = (".bin",',
        "_PICKLES = (",
        f"{_BAD} -k pickle",
    ),
    Fault(
        "tensors of a file may overlap",
        "models/tensor_header.py",
        "            if entry.start != end:",
        "            if False:",
        _FILE,
    ),
    Fault(
        "a shape may be of other bytes",
        "models/tensor_header.py",
        "if dtype in _BYTES and math.prod(shape) * _BYTES[dtype] != end - start:",
        "if False:",
        _FILE,
    ),
    Fault(
        "half a file keeps its name",
        "forge/tensor_file.py",
        "            if kind is None:",
        "            if True:",
        _FILE,
    ),
    Fault(
        "the first rule that fits decides",
        "forge/recipe.py",
        "        for pattern, bits in self.rules:\n            if fnmatchcase(path, pattern):",
        "        for pattern, bits in reversed(self.rules):\n            if fnmatchcase(path, pattern):",
        _PLAN,
    ),
    Fault(
        "a recipe's own rules take bits away",
        "forge/recipe.py",
        "found = max([self.bits, *(bits for pattern, bits in self.usual if fnmatchcase(path, pattern))])",
        "found = next((bits for pattern, bits in self.usual if fnmatchcase(path, pattern)), self.bits)",
        _PLAN,
    ),
    Fault(
        "a rule may fit nothing",
        "forge/plan.py",
        "if not any(fnmatchcase(path, pattern) for path in dense):",
        "if False:",
        _PLAN,
    ),
    Fault("routers are quantised", "forge/plan.py", "and not path.endswith(_ROUTERS)", "", _PLAN),
    Fault(
        "packages are bf16 whatever the source is",
        "forge/recipe.py",
        'dtype="float16" if stored == mx.float16 else "bfloat16"',
        'dtype="bfloat16"',
        _PLAN,
    ),
    Fault(
        "a tensor of another modality may be there twice",
        "forge/plan.py",
        "            if entry.name in found:",
        "            if False:",
        _PLAN,
    ),
    Fault(
        "tensors of other modalities are left out",
        "forge/build.py",
        "if other and not (self._work / OTHER_FILE).exists():",
        "if False:",
        f"{_BUILD} -k modalities",
    ),
    Fault(
        "what is not finite is written",
        "forge/build.py",
        "            _check_finite(part.name, tensor)\n",
        "",
        f"{_BUILD} -k finite",
    ),
    Fault(
        "scales of a projection are not turned with it",
        "forge/build.py",
        r"\.(weight|scales|biases)",
        r"\.(weight)",
        f"{_BUILD} -k turned",
    ),
    Fault(
        "the whole model is in memory",
        "forge/build.py",
        "        tensors = self._checkpoint.mapped_anew()\n",
        "        tensors = self._checkpoint.mapped_anew()\n        kept = dict(tensors)  # noqa: F841\n",
        f"{_BUILD} -k memory_is_bounded",
    ),
    Fault(
        "a head of another trunk is taken in",
        "forge/build.py",
        'if checkpoint.head.source == "separate" and wanted.head:',
        "if False:",
        f"{_BUILD} -k file_of_its_own",
    ),
    Fault(
        "norms that will be misread are written",
        "forge/build.py",
        'if norms not in ("one-plus", "plain"):',
        "if False:",
        f"{_BUILD} -k norms",
    ),
    Fault(
        "mlx-lm is told of one format alone",
        "forge/package_files.py",
        "        if form != usual:",
        "        if False:",
        f"{_FOREIGN} -k mlx_lm",
    ),
    Fault(
        "a package says that it is of the source's dtype",
        "forge/package_files.py",
        "return kept | {name: wanted.recipe.dtype for name in _DTYPES if name in kept}",
        "return kept",
        f"{_BUILD} -k dtypes",
    ),
    Fault(
        "a full disk is found out later", "forge/room.py", "if not self.fits_disk:", "if False:", f"{_BUILD} -k room"
    ),
    Fault(
        "memory that the head takes is not asked for",
        "forge/room.py",
        "package = wanted.nbytes + _HEADS * heads if wanted.loads_model else 0",
        "package = 0",
        f"{_BUILD} -k room",
    ),
    Fault(
        "every build begins anew",
        "forge/workplace.py",
        'if not there.exists() or there.read_text(encoding="utf-8") != journal:',
        "if True:",
        _PLACE,
    ),
    Fault(
        "a build goes on from another's files",
        "forge/workplace.py",
        'if not there.exists() or there.read_text(encoding="utf-8") != journal:',
        "if False:",
        _PLACE,
    ),
    Fault(
        "a build goes on after its config changed",
        "forge/build.py",
        'files = [folder / "config.json", *chain(*weight_files(folder))]',
        "files = [*chain(*weight_files(folder))]",
        _PLACE,
    ),
    Fault(
        "any file of that name is a shard",
        "forge/build.py",
        "    return found == [(entry.name, entry.dtype, entry.shape) for entry in shard.entries]",
        "    return bool(found)",
        _PLACE,
    ),
    Fault(
        "a refused build leaves its folder",
        "forge/workplace.py",
        "                shutil.rmtree(work, ignore_errors=True)\n",
        "",
        _PLACE,
    ),
    Fault(
        "two builds share a folder",
        "forge/workplace.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        _PLACE,
    ),
    Fault(
        "a package takes the place of what appeared meanwhile",
        "forge/workplace.py",
        "                refuse_target(target)\n                work.rename(target)",
        "                work.rename(target)",
        _PLACE,
    ),
    Fault(
        "a sibling's folder is looked at when its time has come",
        "cli/forge.py",
        "    for target in targets:\n        refuse_target(target)",
        "    for target in targets[:1]:\n        refuse_target(target)",
        _COMMAND,
    ),
    Fault(
        "bars are drawn into a pipe",
        "cli/terminal.py",
        "self._shown = shown and is_fancy(sys.stderr)",
        "self._shown = shown",
        f"{_COMMAND} -k pipe",
    ),
]
