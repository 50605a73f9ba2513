"""Guards a follower alone: it notices that it saw other tokens, and holds what rank 0 holds, no longer."""

from __future__ import annotations

import zlib

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.distributed.following import Follower
from selfdraft.distributed.leading import LeadingModel
from selfdraft.errors import SelfdraftError
from selfdraft.models.base import looks_ahead
from tests.support.nano import nano_model


class Sharing:
    """Rank 0 shares the same tokens again and again."""

    tokens = mx.array([[3, 1, 4]])

    def share(self, x: mx.array) -> mx.array:
        return self.tokens

    def follow(self, x: mx.array) -> None:
        """Nothing comes after it."""


@pytest.fixture
def follower() -> Follower:
    return Follower(nano_model(), Sharing())  # type: ignore[arg-type]


def digest(tokens: mx.array) -> int:
    return zlib.crc32(np.array(tokens, dtype=np.int32).tobytes())


def forward(follower: Follower, length: int, of_the_one_before: int) -> None:
    follower.obey(["forward", [1], [length], 3, True, of_the_one_before])
    follower.obey(["commit", [3]])


def test_other_tokens_than_rank_0_saw_are_an_error(follower: Follower) -> None:
    forward(follower, 0, 0)
    forward(follower, 3, digest(Sharing.tokens))
    with pytest.raises(SelfdraftError, match="different tokens"):
        forward(follower, 6, digest(mx.array([[3, 1, 5]])))


def test_what_rank_0_dropped_is_gone(follower: Follower) -> None:
    forward(follower, 0, 0)
    follower.obey(["span", 2, 1, 3, 0, False])
    follower.obey(["moment", 3, 1, 3, False])
    follower.obey(["join", 4, [2], 3, 3, False])
    assert follower.held == (2, 2)
    for number in (1, 2, 3):
        follower.obey(["drop", number])
    assert follower.held == (1, 0)


def test_rank_0_starts_no_cycle_that_it_may_drop() -> None:
    assert not looks_ahead(LeadingModel)  # type: ignore[arg-type]
