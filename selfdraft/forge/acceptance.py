"""How well heads draft for one trunk: at every position of the same texts, depth by depth, by chances and not by luck.

The texts are what the trunk itself samples. Where it goes on with the law p and a head's depth k drafts from q, given
that the drafts before were the text's own tokens, the draft is kept with chance sum min(p, q); a text's own token t
would have been kept, and the next depth reached, with chance min(1, q(t) / p(t)). (The token-wise rule: Leviathan et
al., arXiv 2211.17192.) Every position begins a cycle, so that a text tells more than its decoding would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..engine import Engine, Request
from ..llm import LLM
from ..params import SamplingParams

__all__ = ["Acceptance", "Text", "answers", "measure"]

TEMPERATURE = 0.7  # of the texts, and of p and q
_BESIDE = 8  # answers that are decoded side by side
_AGAIN = 8  # times that a prompt is answered at most


@dataclass(frozen=True)
class Text:
    """A prompt's ids and those of its answer, one after the other. begin: index of the answer's first."""

    ids: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class Acceptance:
    """What was measured of a head.

    Attributes:
        by_depth: chance that a draft is kept at depth 1, 2, ..., given that those before were.
        expected: tokens of cycles of full depth, summed over the positions of all answers to a prompt.
        positions: how many these are.
    """

    by_depth: tuple[float, ...]
    expected: np.ndarray
    positions: np.ndarray

    @property
    def tokens_per_cycle(self) -> float:
        """The mean of all positions."""
        return float(self.expected.sum() / self.positions.sum())

    def over(self, other: Acceptance) -> tuple[float, float]:
        """How many more tokens a cycle has than with another head on the same texts, and the standard error of that.

        Answers to one prompt are alike, so the error is that of a ratio over prompts (linearised).
        """
        more = self.expected - other.expected
        mean = more.sum() / self.positions.sum()
        apart, prompts = more - mean * self.positions, len(more)
        error = (prompts / (prompts - 1) * (apart**2).sum()) ** 0.5 / self.positions.sum() if prompts > 1 else np.inf
        return float(mean), float(error)


def answers(
    llm: LLM, prompts: Sequence[str], *, tokens: int, depth: int, tell: Callable[[int], None] = lambda done: None
) -> list[Text]:
    """What a model samples, each answer up to its end token.

    Args:
        tokens: most of an answer; where answers are shorter, prompts are answered again, to as many tokens in all.
        depth: of its drafts; decides how fast it goes, and what a head is fed meanwhile.
        tell: called with how many tokens are done.

    Raises:
        NonFiniteLogits: it broke down.
    """
    engine, ids = Engine(llm.loaded.model), [llm.tokens(prompt, raw=llm.template is None) for prompt in prompts]
    asked = SamplingParams(
        depth=depth, max_tokens=tokens, min_tokens=min(2 * depth, tokens), temperature=TEMPERATURE, seed=1
    ).resolved({})
    found: list[Text] = []
    done = 0
    for first in range(0, _AGAIN * len(ids), _BESIDE):
        rows = [
            engine.add(Request(ids[number % len(ids)], asked, stop_ids=llm.tokenizer.eos_ids, choice=number))
            for number in range(first, first + _BESIDE)
        ]
        for row in rows:
            for _ in engine.run(row):
                pass
            prompt = row.request.prompt
            found.append(Text((*prompt, *row.emitted), len(prompt)))
            done += len(row.emitted)
            tell(min(done, tokens * len(ids)))
        if done >= tokens * len(ids):
            break
    return found


def measure(
    model: Any,
    heads: Mapping[str, nn.Module],
    texts: Sequence[Text],
    *,
    depth: int,
    tell: Callable[[int], None] = lambda done: None,
) -> dict[str, Acceptance]:
    """How well each of several heads drafts for a model's trunk.

    Args:
        heads: module that takes the place of `model.mtp` -> by name.
        texts: with answers of `depth` tokens or more.
        depth: deepest draft.
        tell: called with how many texts are done.
    """
    own = model.mtp
    chances: dict[str, list[np.ndarray]] = {name: [] for name in heads}
    reached: dict[str, list[np.ndarray]] = {name: [] for name in heads}
    try:
        for done, text in enumerate(texts, start=1):
            trunk = _Trunk(model, text)
            for name, head in heads.items():
                model.mtp = head
                kept, weights = trunk.chances(depth)
                chances[name].append(kept)
                reached[name].append(weights)
            tell(done)
    finally:
        model.mtp = own
    prompts = [text.ids[: text.begin] for text in texts]
    return {name: _summary(chances[name], reached[name], prompts) for name in heads}


def _summary(
    chances: Sequence[np.ndarray], reached: Sequence[np.ndarray], prompts: Sequence[tuple[int, ...]]
) -> Acceptance:
    """Of [starts, depth] a text: chances that a draft is kept, and that it is made."""
    kept = np.array([(chance * made).sum(axis=0) for chance, made in zip(chances, reached, strict=True)])
    made = np.array([each.sum(axis=0) for each in reached])
    by_depth = kept.sum(axis=0) / np.maximum(made.sum(axis=0), np.finfo(np.float32).tiny)
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    of = [places[prompt] for prompt in prompts]
    positions = np.array([len(each) for each in reached])
    expected = np.bincount(of, positions + kept.sum(axis=1))
    return Acceptance(tuple(by_depth.tolist()), expected, np.bincount(of, positions))


class _Trunk:
    """A trunk's pass over a text: its hiddens and laws."""

    def __init__(self, model: Any, text: Text) -> None:
        self._model, self._text = model, text
        self._ids = mx.array([list(text.ids)])
        self._state = model.new_state()
        self._hidden, captured = model.forward(self._ids, [self._state], keep_steps=False)
        captured.commit([self._state], [len(text.ids)])  # a head may read what the trunk holds
        self._p = _law(model.logits(self._hidden[:, text.begin :])[0])
        mx.eval(self._hidden, self._p)

    def chances(self, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Chances that a draft is kept, given that it is made, and that it is made: [starts, depth] each."""
        model, begin = self._model, self._text.begin
        state = self._state.fork()
        starts = range(begin, len(self._text.ids) - depth + 1)
        out = model.draft(self._ids[:, 1:], self._hidden[:, :-1], [state], [0])
        out = out[:, begin - 1 : begin - 1 + len(starts)].swapaxes(0, 1)  # a token's pair is the entry before it
        states = [state.fork() for _ in starts]
        weight, kept, made = mx.ones(len(starts)), [], []
        for step in range(depth):
            q = _law(model.draft_logits(out, step)[:, 0])
            p = self._p[step : step + len(starts)]
            kept.append(mx.minimum(p, q).sum(axis=-1))
            made.append(weight)
            if step + 1 == depth:
                break
            token = self._ids[0, begin + step + 1 : begin + step + 1 + len(starts), None]
            ratio = mx.take_along_axis(q, token, axis=-1) / mx.take_along_axis(p, token, axis=-1)
            weight = weight * mx.minimum(ratio[:, 0], 1)
            out = model.draft(token, out, states, [start + step for start in starts], step + 1)
            mx.eval(out, weight)
        return np.array(mx.stack(kept, axis=1)), np.array(mx.stack(made, axis=1))


def _law(logits: mx.array) -> mx.array:
    """Probabilities, float32, [T, V] as the logits."""
    return mx.softmax(logits.astype(mx.float32) / TEMPERATURE, axis=-1)
