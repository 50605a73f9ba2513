"""Guards what sparse attention chooses: the best positions, of equal ones the first, however many queries there are."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.models.deepseek_v32 import best


def chosen(scores: np.ndarray, count: int) -> np.ndarray:
    """By a stable sort."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    found = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(found, order, True, axis=-1)
    return found


@pytest.mark.parametrize("values", [2, 5, 1000])
@pytest.mark.parametrize("count", [1, 7, 63, 64])
def test_the_first_of_equal_scores_are_chosen(values: int, count: int) -> None:
    scores = np.random.RandomState(values).randint(0, values, (9, 64)).astype(np.float32)
    scores[2, 40:] = -np.inf  # positions behind a query
    assert np.array_equal(np.array(best(mx.array(scores), count)), chosen(scores, count))


def test_positions_behind_a_query_change_nothing() -> None:
    scores = mx.array(np.random.RandomState(3).randint(0, 3, (1, 50)).astype(np.float32))
    longer = mx.concatenate([scores, mx.full((1, 8), -mx.inf)], axis=1)
    assert mx.array_equal(best(scores, 20), best(longer, 20)[:, :50]).item()
