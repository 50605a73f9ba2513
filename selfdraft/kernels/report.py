"""What a cycle tells the host and leaves to the next: its small arrays in one launch. Knows no row's address."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .portable import Call, Kernel, Launch, remember
from .self_check import SelfCheck
from .small_arrays import pieces, read, readable

__all__ = ["CHECK", "Report", "report", "report_reference"]

_KERNEL = Kernel(
    "report",
    ("accepted", "following", "drafts", "depths", "coupled", "flaws", "draft_flaws"),
    ("tokens", "counts", "report"),
    many=("report",),
)

_CALLS: dict[tuple[object, ...], Call] = {}


@dataclass(frozen=True)
class Report:
    """What a cycle emits.

    Attributes:
        tokens: drafts that stay and the token after, uint32 [B, K+1]; what lies behind is that token again.
        counts: how many of these are emitted, int32 [B].
        parts: what `read` takes, see `readable`.
    """

    tokens: mx.array
    counts: mx.array
    parts: list[mx.array]

    def read(self) -> tuple[list[int], list[bool], list[list[int]]]:
        """Once `parts` are evaluated, of each row: how many drafts stay, whether the logits that this hangs on are
        numbers, and its tokens."""
        (rows, positions), found = self.tokens.shape, read(self.parts)
        lines = [found[row * (positions + 2) : (row + 1) * (positions + 2)] for row in range(rows)]
        return [line[0] for line in lines], [bool(line[1]) for line in lines], [line[2:] for line in lines]


def report(
    accepted: mx.array,
    following: mx.array,
    drafts: mx.array,
    depths: mx.array,
    coupled: mx.array,
    flaws: mx.array,
    draft_flaws: mx.array,
) -> Report:
    """Put together what a cycle emits. Needs a GPU.

    Args:
        accepted: drafts that stay, int32 [B]; at most `depths`, int32 [B or more].
        following: the token after, uint32 [B].
        drafts: uint32 [B, K].
        coupled: int32 [B or more]; 0 for rows by rejection, which may hang on all of their drafts.
        flaws: of the model's logits, int32 [B, K+1], see `kept_logits`: none is allowed.
        draft_flaws: of the head's, int32 [B, K]: -inf is allowed. Padding where a row is not so deep.

    Raises:
        ValueError: the kernel does not take these shapes or dtypes.
        RuntimeError: there is no GPU.
    """
    if not drafts.size:
        drafts, draft_flaws = following[:, None], flaws  # which are not read
    given = accepted, following, drafts, depths, coupled, flaws, draft_flaws
    key = (*(x.shape for x in given), *(x.dtype for x in given))
    call = _CALLS.get(key) or remember(_CALLS, key, _prepared(given))
    tokens, counts, *parts = call(inputs=list(given))
    return Report(tokens, counts, parts)


def report_reference(
    accepted: mx.array,
    following: mx.array,
    drafts: mx.array,
    depths: mx.array,
    coupled: mx.array,
    flaws: mx.array,
    draft_flaws: mx.array,
) -> Report:
    """The same by plain MLX operations, on any device."""
    rows, positions = flaws.shape
    places, depth = mx.arange(positions), depths[:rows, None]
    padded, drafted = (mx.pad(x, [(0, 0), (0, 1)]) for x in (drafts, draft_flaws))
    tokens = mx.where(places < accepted[:, None], padded, following[:, None]).astype(mx.uint32)
    sound = (flaws == 0) & ((drafted < 2) | (places >= depth))
    decisive = mx.where(coupled[:rows, None] != 0, accepted[:, None], depth)
    lines = [accepted[:, None], (sound | (places > decisive)).all(axis=1, keepdims=True), tokens]
    numbers = mx.concatenate([x.astype(mx.uint32) for x in lines], axis=1)
    return Report(tokens, accepted.astype(mx.int32) + 1, readable(numbers.flatten()))


def _prepared(given: tuple[mx.array, ...]) -> Call:
    accepted, following, drafts, depths, coupled, flaws, draft_flaws = given
    i, u, rows = mx.int32, mx.uint32, accepted.size
    if (
        [x.dtype for x in given] != [i, u, u, i, i, i, i]
        or [x.ndim for x in given] != [1, 1, 2, 1, 1, 2, 2]
        or not 0 < rows == following.size == flaws.shape[0]
        or min(depths.size, coupled.size) < rows
        or drafts.shape != (rows, max(flaws.shape[1] - 1, 1))
        or draft_flaws.shape != drafts.shape
    ):
        text = ", ".join(f"{x.dtype} {x.shape}" for x in given)
        raise ValueError(
            "report takes int32 [B], uint32 [B], uint32 [B, K], int32 [B] and [B] (these two or more), int32 [B, K+1] "
            f"and [B, K], not {text}"
        )
    numbers = rows * (flaws.shape[1] + 2)
    parts, piece = pieces(numbers)
    shapes = [flaws.shape, (rows,), *[(piece,)] * parts]
    template = {"PIECE": piece if parts > 1 else 0}
    launch = Launch(template, (1, 1, parts), 32, shapes, [u, i, *[u] * parts])
    return _KERNEL.for_rows(parts).prepared(launch, [x.dtype for x in given])


def _cases(rows: int, most: int, seed: int) -> list[mx.array]:
    """Arguments: all depths, both kinds of rows, few flaws."""
    keys = mx.random.split(mx.random.key(seed), 5)
    depths = most - mx.arange(rows + 2) % (most + 1)
    accepted = (mx.random.uniform(shape=(rows,), key=keys[0]) * (depths[:rows] + 1)).astype(mx.int32)
    drafts = mx.random.randint(0, 1000, (rows, most), key=keys[1]).astype(mx.uint32)
    flaws = 1 - mx.minimum(mx.random.randint(0, 9, (rows, most + 1), key=keys[2]), 1)
    draft_flaws = 2 - mx.minimum(mx.random.randint(0, 9, (rows, most), key=keys[3]), 2)
    following = mx.random.randint(0, 1000, (rows,), key=keys[4]).astype(mx.uint32)
    return [accepted, following, drafts, depths, mx.arange(rows + 1) % 2, flaws, draft_flaws]


def _check_error() -> float:
    """Share of the numbers that are not the reference's."""
    wrong = []
    for rows, most in ((1, 0), (1, 1), (1, 3), (4, 3), (3, 8), (40, 5)):
        given = _cases(rows, most, rows + most)
        found, expected = report(*given), report_reference(*given)
        wrong += [np.array(found.tokens != expected.tokens), np.array(found.counts != expected.counts)]
        wrong.append(np.array([found.read() != expected.read()]))
    return float(np.concatenate([each.reshape(-1) for each in wrong]).mean())


# They are whole numbers.
CHECK = SelfCheck("report", _check_error, most=0.0)
