"""How cost grows: with the width of a verify pass, the length of a prompt, the length of the context."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from .measure import Spread, decode
from .peers import MlxLm
from .subject import Subject

__all__ = ["context_ladder", "prefill_ladder", "verify_costs"]

_CONTEXT = 64  # tokens behind which a verify pass is timed

Tell = Callable[[str], None]


def verify_costs(subject: Subject, widths: Sequence[int], repeats: int) -> dict[str, Any]:
    """Milliseconds of a verify pass by width M, relative to M = 1 as v(M), and of a step of the head.

    All are timed in turn, `repeats` times after one that does not count. A pass includes the output projection.
    """
    model = subject.model
    ids = subject.text(_CONTEXT + max(widths))
    prefix, rest = mx.array([ids[:_CONTEXT]]), mx.array([ids[_CONTEXT:]])
    base = model.new_state()
    hidden, captured = model.forward(prefix, [base], keep_steps=False)
    captured.commit([base], [_CONTEXT])
    mx.eval(base.arrays(), hidden)

    def verify(width: int) -> None:
        out, _ = model.forward(rest[:, :width], [base.fork()], keep_steps=True)
        mx.eval(model.logits(out))

    def head() -> None:
        mx.eval(model.draft_logits(model.draft(rest[:, :1], hidden[:, -1:], [base.fork()], [0])))

    jobs: dict[str, Callable[[], None]] = {str(width): partial(verify, width) for width in widths}
    if model.max_depth:
        jobs["head"] = head
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats + 1):
        for name, job in jobs.items():
            begin = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - begin)
    ms = {name: 1e3 * Spread.of(values[1:]).median for name, values in times.items()}
    one = ms[str(min(widths))]
    return {
        "behind_tokens": _CONTEXT,
        "ms": {name: round(value, 3) for name, value in ms.items() if name != "head"},
        "v": {name: round(value / one, 3) for name, value in ms.items() if name != "head"},
        **({"head_ms": round(ms["head"], 3), "head": round(ms["head"] / one, 3)} if "head" in ms else {}),
    }


def prefill_ladder(
    subject: Subject, peers: Sequence[MlxLm], lengths: Sequence[int], rounds: int, tell: Tell
) -> list[dict[str, Any]]:
    """Prompt tokens a second by length of the prompt: ours, the head's history included, and the peers'."""
    depth = min(1, subject.model.max_depth)
    jobs: dict[str, Callable[[list[int]], float]] = {
        "selfdraft": lambda ids: decode(subject.engine, [ids], depth, 2).prompt_seconds,
        **{peer.name: partial(_first_token, peer) for peer in peers},
    }

    def rates(length: int) -> dict[str, Any]:
        ids = subject.text(length)
        tell(f"prefill of {length:,} tokens")
        spreads = _in_turn({name: partial(_rate, job, ids) for name, job in jobs.items()}, rounds)
        return {name: spread.rounded(1) for name, spread in spreads.items()}

    return [{"tokens": length, "tokens_per_second": rates(length)} for length in lengths]


def context_ladder(
    subject: Subject, depth: int, lengths: Sequence[int], tokens: int, rounds: int, tell: Tell
) -> list[dict[str, Any]]:
    """Tokens decoded a second by length of the context before them, plainly and at a depth."""

    def rates(length: int) -> dict[str, Any]:
        ids = subject.text(length)
        tell(f"decoding behind {length:,} tokens")
        jobs = {
            name: partial(lambda k: decode(subject.engine, [ids], k, tokens).rate, k)
            for name, k in {f"depth {depth}": depth, "plain": 0}.items()
        }
        return {name: spread.rounded() for name, spread in _in_turn(jobs, rounds).items()}

    return [{"tokens": length, "tokens_per_second": rates(length)} for length in lengths]


def _in_turn(jobs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Spread]:
    """What jobs return, each called once a round, every second round backwards; one round before does not count."""
    values: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds + 1):
        for name in list(jobs) if number % 2 else list(jobs)[::-1]:
            value = jobs[name]()
            if number:
                values[name].append(value)
    return {name: Spread.of(each) for name, each in values.items()}


def _first_token(peer: MlxLm, ids: list[int]) -> float:
    return peer.decode([ids], 2).prompt_seconds


def _rate(job: Callable[[list[int]], float], ids: list[int]) -> float:
    return len(ids) / job(ids)
