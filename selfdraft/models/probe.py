"""Does a head belong to a trunk? Asked of the pair itself, on fixed text, since names and shapes cannot tell."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .base import Model

__all__ = ["LEAST_ACCEPTANCE", "PROBE_TEXT", "probe_acceptance", "why_foreign"]

LEAST_ACCEPTANCE = 0.2  # a wrong wiring or a foreign head measures near 0, a working one 0.4 and more

PROBE_TEXT = """The history of the lighthouse begins with fires on hills near the sea. Later, towers were built so that
the light could be seen from ships far away. In the nineteenth century better lamps and lenses were made.

```python
def average(numbers):
    total = 0
    for number in numbers:
        total += number
    return total / len(numbers)
```

The function `average` returns the mean of a list of numbers. If the list is empty, it raises an error.
"""


def probe_acceptance(model: Model, tokens: Sequence[int]) -> float:
    """Share of positions at which the head's first draft is the trunk's own choice, with true history.

    Args:
        model: trunk and head.
        tokens: the probe text, at least 3 tokens.
    """
    row = model.new_state()
    hidden, captured = model.forward(mx.array([list(tokens)]), [row], keep_steps=False)
    captured.commit([row], [len(tokens)])  # a head may read what the trunk holds
    choice = mx.argmax(model.logits(hidden), axis=-1)
    # Pair i, (h_{i-1}, t_i), predicts t_{i+1}; so does the trunk at position i.
    out = model.draft(mx.array([list(tokens[1:])]), hidden[:, :-1], [row], [0])
    drafted = mx.argmax(model.draft_logits(out, whole=True), axis=-1)
    agreed: list[bool] = (drafted == choice[:, 1:])[0].tolist()  # type: ignore[assignment]
    return sum(agreed) / len(agreed)


def why_foreign(model: Model, tokens: Sequence[int]) -> str:
    """Why a head in a file of its own is not this trunk's; "" if it is. Arguments as in `probe_acceptance`."""
    acceptance = probe_acceptance(model, tokens)
    if acceptance >= LEAST_ACCEPTANCE:
        return ""
    return (
        f"the separate head file drafts {acceptance:.0%} of the trunk's own tokens on fixed text, below "
        f"{LEAST_ACCEPTANCE:.0%}: it was not trained with this trunk, or its norms are stored in another convention"
    )
