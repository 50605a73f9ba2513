"""What an adapter does to drafting: how many of the head's drafts the trunk takes, with it and without. No speed."""

from __future__ import annotations

from typing import Any

from .measure import decode
from .subject import Subject

__all__ = ["drafting", "effect_line"]

_DEPTH = 3


def drafting(subject: Subject, prompts: int, tokens: int) -> dict[str, Any] | None:
    """How a model drafts, greedily, at depth 3 or the deepest that its head allows; None without a head.

    Args:
        prompts, tokens: how many of the subject's prompts, and tokens decoded of each.
    """
    depth = min(_DEPTH, subject.model.max_depth)
    if not depth:
        return None
    done = decode(subject.engine, subject.prompts[:prompts], depth, tokens)
    return {
        "depth": depth,
        "tokens_per_cycle": round(done.tokens / done.cycles, 3),
        "acceptance": [round(rate, 4) for rate in done.acceptance],
    }


def effect_line(report: dict[str, Any]) -> str:
    """What a report says of its adapter, for people."""
    effect = report["adapter_effect"]
    said = [
        f"{effect[which]['tokens_per_cycle']:.2f} tokens a cycle {which} it (acceptance "
        f"{' '.join(f'{rate:.2f}' for rate in effect[which]['acceptance'])})"
        for which in ("with", "without")
    ]
    return f"adapter {report['adapter']['name']}, depth {effect['with']['depth']}: {', '.join(said)}"
