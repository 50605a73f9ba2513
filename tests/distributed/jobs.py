"""What rank 0 does in tests, and what one process does alone to be compared with it. Results are plain JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from selfdraft.distributed.leading import Leader
from selfdraft.llm import LLM
from selfdraft.loading import load
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from selfdraft.params import SamplingParams
from selfdraft.settings import load_settings

__all__ = ["answers", "brief", "logits", "opened", "texts", "traffic"]

PROMPTS = ("The lighthouse", "def average(numbers):", "One, two, three")
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.0, "depth": 0},
    "greedy": {"temperature": 0.0, "depth": 3},
    "seeded": {"temperature": 0.8, "seed": 11, "depth": 2},
    "penalised": {"temperature": 0.0, "depth": 2, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "adaptive": {"temperature": 0.0, "depth": "auto"},
}
TOKENS = 8


def opened(folder: str, leader: Leader | None = None) -> LLM:
    """The model of a folder, alone or as rank 0."""
    settings = load_settings(dtype="float32", ssd_session_cache="off", memory_limit=2**30, prefill_chunk=16)
    return load(folder, settings=settings, leader=leader)


def texts(leader: Leader | None, folder: str) -> dict[str, Any]:
    """Token ids of every kind of request."""
    return answers(opened(folder, leader))


def answers(llm: LLM) -> dict[str, Any]:
    """Token ids of every kind of request, one after the other and together."""

    def params(**given: Any) -> SamplingParams:
        return SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **given})

    found: dict[str, Any] = {
        name: llm.generate(PROMPTS[0], params(**given), raw=True).token_ids for name, given in PARAMETERS.items()
    }
    greedy = params(temperature=0.0, depth=2)
    found["batch"] = [each.token_ids for each in llm.generate_many(PROMPTS, greedy, raw=True)]
    tokens = llm.tokens(PROMPTS[1] + " and more than a chunk of a prompt, so that there are several", raw=True)
    first = llm.generate(tokens, greedy)
    second = llm.generate([*tokens, *first.token_ids, 5, 6, 7], greedy)
    found["turns"] = [first.token_ids, second.token_ids]
    found["restored"] = second.usage.cached_tokens
    cancelled = llm.stream(PROMPTS[2], greedy, raw=True)
    next(cancelled)
    cancelled.close()
    found["after a cancel"] = llm.generate(PROMPTS[2], greedy, raw=True).token_ids
    found["prompt scores"] = [round(each.logprob, 3) for each in llm.score(PROMPTS[2], raw=True) if each]
    return found


def brief(leader: Leader | None, folder: str) -> dict[str, Any]:
    """Token ids of a short answer: what many ranks on few cores have time for, where a message takes long."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.7, seed=3, depth=2, cache_prompt=False)
    return {"seeded": opened(folder, leader).generate(PROMPTS[0], params, raw=True).token_ids}


def logits(leader: Leader, folder: str) -> dict[str, Any]:
    """How far logits of trunk and head are from those of one process, and what a rank holds."""
    llm = opened(folder, leader)
    whole = build_model(classify(llm.checkpoint.folder), with_head=True, dtype=mx.float32)
    ours, theirs = (_outputs(model) for model in (llm.loaded.model, whole.model))
    return {
        "difference": max(mx.abs(a - b).max().item() for a, b in zip(ours, theirs, strict=True)),
        "scale": max(mx.abs(b).max().item() for b in theirs),
        "bytes": [llm.loaded.nbytes, whole.nbytes],
        "row": [each.row_bytes(1000) for each in (llm.loaded.model, whole.model)],
    }


def _outputs(model: Any) -> list[mx.array]:
    tokens, state = mx.array([[3, 1, 4, 1, 5, 9, 2]]), model.new_state()
    hidden, captured = model.forward(tokens, [state], keep_steps=True)
    captured.commit([state], [5])
    first = model.logits(hidden)
    drafted = model.draft(tokens[:, 1:], hidden[:, :-1], [state], [0])
    more, _ = model.forward(mx.array([[8, 7]]), [state], keep_steps=True)
    found = [first, model.draft_logits(drafted), model.logits(more[:, -1:])]
    mx.eval(found)
    return found


def traffic(leader: Leader, folder: str) -> dict[str, Any]:
    """Messages, and bytes that each rank sends, of a trunk forward of three tokens, its logits, and one draft."""
    llm = opened(folder, leader)
    model, group = llm.loaded.model, leader.group
    state = model.new_state()

    def counted(run: Callable[[], mx.array]) -> tuple[list[int], mx.array]:
        before = group.collectives, group.bytes
        out = run()
        mx.eval(out)
        return [group.collectives - before[0], group.bytes - before[1]], out

    forward, hidden = counted(lambda: model.forward(mx.array([[1, 2, 3]]), [state], keep_steps=True)[0])
    projected, _ = counted(lambda: model.logits(hidden))
    drafted, _ = counted(lambda: model.draft(mx.array([[1]]), hidden[:, :1], [state], [0]))
    return {"forward": forward, "logits": projected, "draft": drafted}
