"""Faults in the families of models."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

_FAMILIES = "tests/models/test_families.py"

FAULTS = [
    Fault(
        "ERNIE weighs experts with the bias that only chooses",
        "models/ernie4_5_moe.py",
        "weights = mx.take_along_axis(scores, chosen, axis=-1)",
        "weights = mx.take_along_axis(scores + self.e_score_correction_bias, chosen, axis=-1)",
        f"{_FAMILIES} -k ernie",
    ),
    Fault(
        "ERNIE chooses experts without the bias",
        "models/ernie4_5_moe.py",
        "mx.argpartition(-(scores + self.e_score_correction_bias)",
        "mx.argpartition(-scores",
        f"{_FAMILIES} -k ernie",
    ),
    Fault(
        "ERNIE's module is not behind the trunk's norm",
        "models/ernie4_5_moe.py",
        "super().draft_logits(self.model.norm(hidden), step, whole=whole)",
        "super().draft_logits(hidden, step, whole=whole)",
        f"{_FAMILIES} -k ernie",
    ),
    Fault(
        "ERNIE's transposed projection stays as it is",
        "models/ernie4_5_moe.py",
        "found[projection] = found[projection].T",
        "pass",
        "tests/models/test_ernie4_5_moe.py",
    ),
    Fault(
        "ERNIE without biases says nothing",
        "models/ernie4_5_moe.py",
        'if not lost or config.get("moe_use_aux_free") is False:',
        "if True:",
        "tests/models/test_ernie4_5_moe.py",
    ),
    Fault(
        "ERNIE's last layer with experts is not counted from the end",
        "models/ernie4_5_moe.py",
        "last = layers - 1 if last == -1 else last",
        "last = last",
        "tests/models/test_ernie4_5_moe.py",
    ),
]
