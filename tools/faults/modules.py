"""Faults of families of models: how their heads are wired, how their tensors are read, what is kept of their state."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAMILIES = "tests/models/test_families.py"
FP8 = "tests/models/test_fp8_checkpoints.py"

FAULTS = [
    Fault(
        "MiMo's head takes the embedding first",
        "models/mimo.py",
        "embedding_first=False",
        "embedding_first=True",
        f"{FAMILIES} -k mimo",
    ),
    Fault(
        "MiMo's head is chained",
        "models/mimo.py",
        "max_depth=1,",
        "max_depth=8,",
        f"{FAMILIES} -k mimo",
    ),
    Fault(
        "modules that stand side by side are chained",
        "models/mimo_v2_flash.py",
        "side_by_side=True",
        "side_by_side=False",
        f"{FAMILIES} -k mimo_v2_flash",
    ),
    Fault(
        "a later step side by side takes what the step before put out",
        "models/mtp_modules.py",
        "if step and self._side_by_side:",
        "if False:",
        f"{FAMILIES} -k mimo_v2_flash",
    ),
    Fault(
        "MiMo-V2-Flash's head takes the hidden behind the last norm",
        "models/mimo_v2_flash.py",
        "head_before_norm=True",
        "head_before_norm=False",
        f"{FAMILIES} -k mimo_v2_flash",
    ),
    Fault(
        "MiMo-V2-Flash's windows are one position short",
        "models/mimo_v2_flash.py",
        "window = args.sliding_window_size + 1",
        "window = args.sliding_window_size",
        f"{FAMILIES} -k mimo_v2_flash",
    ),
    Fault(
        "MiMo-V2-Flash's modules see everything",
        "models/mimo_v2_flash.py",
        "modules=(sliding,) * modules",
        "modules=(full,) * modules",
        f"{FAMILIES} -k mimo_v2_flash",
    ),
    Fault(
        "Step's head takes the hidden behind the last norm",
        "models/step3p5.py",
        "head_before_norm=True",
        "head_before_norm=False",
        f"{FAMILIES} -k step3p5",
    ),
    Fault(
        "Step's modules draft with the trunk's output projection",
        "models/transformer.py",
        'if self.max_depth and isinstance(self.mtp, MTPModules) and "output" in self.mtp.at(0):',
        "if False:",
        f"{FAMILIES} -k step3p5",
    ),
    Fault(
        "all steps draft with the first module's output projection",
        "models/draft_projection.py",
        "layers[min(step, len(layers) - 1)]",
        "layers[0]",
        f"{FAMILIES} -k step3p5",
    ),
    Fault(
        "Step's norms are taken as stored",
        "models/step3p5.py",
        'zero_centred=lambda name: name.endswith("norm.weight")',
        'zero_centred=lambda name: name.endswith("layernorm.weight")',
        f"{FAMILIES} -k step3p5",
    ),
    Fault(
        "a module takes what the one before it put out for the entry after",
        "models/mtp_modules.py",
        "earlier = found[:, :-1]",
        "earlier = found[:, 1:]",
        f"{FAMILIES} -k step3p5",
    ),
    Fault(
        "a pass that is padded hides what modules handed on",
        "state/row.py",
        "column = length - 1 - module - max(self.offset - module, 0)",
        "column = self.outputs[module].shape[1] - 1",
        f"{FAMILIES} -k step3p5",
    ),
    Fault(
        "modules' entries are stored as if none were behind",
        "sessions/payload.py",
        "1 + shape.behind",
        "1",
        f"{FAMILIES} -k step3p5",
    ),
    Fault(
        "FP8 keys with blocks a head are refused",
        "models/mimo_v2_flash.py",
        'if name.endswith("k_proj.weight") else None',
        'if name.endswith("k_proj.bias") else None',
        FP8,
    ),
    Fault(
        "windows are stored one position short",
        "sessions/payload.py",
        "max(layer.begin(end), layer.first)",
        "max(layer.begin(end + 1), layer.first)",
        "tests/sessions/test_exact.py -k modules",
    ),
    Fault(
        "values of the wrong kind go from a config into layers",
        "models/config.py",
        "if field.name not in but and not _is_of_kind(value, hints[field.name]):",
        "if False:",
        "tests/models/test_family_configs.py",
    ),
]
