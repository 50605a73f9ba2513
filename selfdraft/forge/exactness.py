"""Does drafting decode as plain decoding does? Greedy answers token for token, and rows of a verify pass one by one.

On a CPU with MLX's reference BLAS both are equal to the bit. Elsewhere a kernel's rounding may hang on how many rows
there are: then an answer may part where two tokens tie within that rounding, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from ..engine import Engine, Request
from ..llm import LLM
from ..models.probe import PROBE_TEXT
from ..params import SamplingParams
from .texts import HELD_OUT

__all__ = ["Exactness", "measure"]

TOKENS = 48  # of an answer
DEPTHS = (1, 2, 4)
_BEHIND = 32  # tokens of text before the rows that are compared


@dataclass(frozen=True)
class Exactness:
    """What was measured.

    Attributes:
        prompts, tokens: how many greedy answers, of how many tokens each.
        equal_by_depth: how many of them are those of plain decoding, by depth.
        rows: largest difference of logits to a pass over one token, by how many tokens a pass had.
        largest_gap: of the logits of two tokens where an answer parted from plain decoding's; None if none did.
        rounding: how large a gap the rounding of logits explains.
    """

    prompts: int
    tokens: int
    equal_by_depth: dict[str, int]
    rows: dict[str, float]
    largest_gap: float | None
    rounding: float

    @property
    def problem(self) -> str:
        """Why drafting does not decode as plain decoding does; "" if it does."""
        if self.largest_gap is None or self.largest_gap <= self.rounding:
            return ""
        return (
            f"a drafted answer parts from plain decoding between tokens whose logits are {self.largest_gap:.2g} apart, "
            f"where rounding explains {self.rounding:.2g}"
        )

    def describe(self) -> dict[str, Any]:
        """For `selfdraft.json`."""
        return asdict(self)


def measure(llm: LLM) -> Exactness:
    """Decode the same prompts plainly and with drafts.

    Raises:
        NonFiniteLogits: the model broke down.
    """
    prompts = [llm.tokens(text, raw=llm.template is None) for text in HELD_OUT]
    plain = _answers(llm, prompts, 0)
    equal, gaps, largest = {}, [], 0.0
    for depth in sorted({min(depth, llm.max_depth) for depth in DEPTHS}):
        drafted = _answers(llm, prompts, depth)
        equal[str(depth)] = sum(a == b for a, b in zip(drafted, plain, strict=True))
        for prompt, ours, theirs in zip(prompts, drafted, plain, strict=True):
            if ours != theirs:
                gap, size = _gap(llm.loaded.model, prompt, ours, theirs)
                gaps.append(gap)
                largest = max(largest, size)
    rows = _rows_alike(llm)
    rounding = 4 * max(rows.values()) + 2 * mx.finfo(llm.loaded.dtype).eps * largest
    return Exactness(len(prompts), TOKENS, equal, rows, max(gaps, default=None), float(rounding))


def _answers(llm: LLM, prompts: Sequence[Sequence[int]], depth: int) -> list[list[int]]:
    asked = SamplingParams(depth=depth, max_tokens=TOKENS, temperature=0, ignore_eos=True).resolved({})
    engine = Engine(llm.loaded.model)
    rows = [engine.add(Request(prompt, asked)) for prompt in prompts]
    for row in rows:
        for _ in engine.run(row):
            pass
    return [row.emitted for row in rows]


def _gap(model: Any, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> tuple[float, float]:
    """How far apart the logits of two tokens are where answers part, and how large the largest logit is there."""
    place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    ids = mx.array([[*prompt, *theirs[:place]]])
    hidden, _ = model.forward(ids, [model.new_state()], keep_steps=False)
    logits = model.logits(hidden[:, -1:])[0, 0].astype(mx.float32)
    gap: Any = mx.abs(logits[theirs[place]] - logits[ours[place]]).item()
    size: Any = mx.abs(logits).max().item()
    return float(gap), float(size)


def _rows_alike(llm: LLM) -> dict[str, float]:
    model, tokens = llm.loaded.model, llm.tokenizer.encode(PROBE_TEXT, special=False)
    begun = model.new_state()
    _, captured = model.forward(mx.array([tokens[:_BEHIND]]), [begun], keep_steps=False)
    captured.commit([begun], [_BEHIND])
    found = {}
    for width in range(2, min(llm.max_depth, max(DEPTHS)) + 2):
        together, alone = begun.fork(), begun.fork()
        window = tokens[_BEHIND : _BEHIND + width]
        wide = model.logits(model.forward(mx.array([window]), [together], keep_steps=True)[0])
        single = []
        for token in window:
            hidden, captured = model.forward(mx.array([[token]]), [alone], keep_steps=True)
            captured.commit([alone], [1])
            single.append(model.logits(hidden))
        apart = mx.abs(wide.astype(mx.float32) - mx.concatenate(single, axis=1).astype(mx.float32)).max()
        difference: Any = apart.item()
        found[str(width)] = float(difference)
    return found
