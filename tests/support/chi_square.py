"""Chi-square tests of counts, with rare categories pooled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats  # type: ignore[import-untyped]

__all__ = ["against_law", "two_samples"]

LEAST = 8.0  # expected count below which a category is pooled with the other rare ones


def against_law(counts: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    """p-value of counts under a law. 0 when something happened that the law forbids."""
    if any(law.get(key, 0.0) <= 0 for key, count in counts.items() if count):
        return 0.0
    total = sum(counts.values())
    keys = sorted(law, key=lambda key: (-law[key], repr(key)))
    observed = np.array([counts.get(key, 0) for key in keys], dtype=np.float64)
    expected = np.array([law[key] for key in keys], dtype=np.float64) * total
    observed, expected = _pooled(observed, expected), _pooled(expected, expected)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(expected) - 1))


def two_samples(a: Mapping[Any, int], b: Mapping[Any, int]) -> float:
    """p-value of two samples having one law."""
    keys = sorted({*a, *b}, key=lambda key: (-(a.get(key, 0) + b.get(key, 0)), repr(key)))
    counts = np.array([[side.get(key, 0) for key in keys] for side in (a, b)], dtype=np.float64)
    expected = counts.sum(axis=0) * min(counts.sum(axis=1)) / counts.sum()  # on the smaller side
    pooled = np.stack([_pooled(side, expected) for side in counts])
    if pooled.shape[1] < 2:
        return 1.0
    return float(stats.chi2_contingency(pooled, correction=False).pvalue)


def _pooled(values: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sum the values whose expected count is small; should that sum be small too, it joins the last large one."""
    rare = expected < LEAST
    if not rare.any():
        return values
    if rare.all():
        return np.array([values.sum()])
    kept, rest = values[~rare], values[rare].sum()
    if expected[rare].sum() < LEAST:
        kept = kept.copy()
        kept[-1] += rest
        return kept
    return np.array([*kept, rest])
