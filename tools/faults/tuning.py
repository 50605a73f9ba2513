"""Faults of what is measured about depths, and of what is done with it."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        "a prediction is believed however uncertain it is",
        "engine/costs.py",
        "value > 0 and error < self._SURE * value",
        "value > 0",
        "tests/engine/test_costs.py",
    ),
    Fault(
        "a depth is kept whatever the spread",
        "tuning/tune.py",
        "> max(self.rates.width, plain.rates.width)",
        "> 0",
        "tests/tuning/test_tune.py",
    ),
    Fault(
        "a tuned start is forgotten",
        "engine/depth.py",
        "self._depth = min(start.depth, max_depth) if start else max_depth",
        "self._depth = max_depth",
        "tests/engine/test_costs.py",
    ),
    Fault(
        "a record of another build is used",
        "tuned.py",
        ' or content["belongs_to"] != dict(wanted)',
        "",
        "tests/tuning/test_tune.py",
    ),
]
