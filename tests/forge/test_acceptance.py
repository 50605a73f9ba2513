"""Guards that heads are compared by what an engine would have accepted, position by position, and with an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.engine import Engine, Request
from selfdraft.engine.accept import TOKENWISE
from selfdraft.forge import acceptance
from selfdraft.forge.acceptance import TEMPERATURE, Acceptance, Text, measure
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from selfdraft.params import SamplingParams
from tests.models.test_families import write_checkpoint
from tests.reference.families import FAMILIES
from tests.support.nano import SPARSE, nano_model, well_drafted_model

DEPTH = 3


def law(logits: mx.array) -> np.ndarray:
    z = np.array(logits.astype(mx.float32), dtype=np.float64) / TEMPERATURE
    raised = np.exp(z - z.max())
    return np.asarray(raised / raised.sum())


def chances(model: Any, ids: tuple[int, ...], newest: int, depth: int = DEPTH) -> list[tuple[float, float]]:
    """(chance that a draft is kept if it is made, chance that it is made) of a cycle behind ids[newest], alone."""
    trunk, _ = model.forward(mx.array([ids]), [model.new_state()], keep_steps=False)
    state = model.new_state()
    hidden, captured = model.forward(mx.array([ids[: newest + 1]]), [state], keep_steps=False)
    captured.commit([state], [newest + 1])
    out = model.draft(mx.array([ids[1 : newest + 1]]), hidden[:, :-1], [state], [0])[:, -1:]
    found, made = [], 1.0
    for step in range(depth):
        p, q = law(model.logits(trunk)[0, newest + step]), law(model.draft_logits(out, step)[0, 0])
        found.append((float(np.minimum(p, q).sum()), made))
        if step + 1 < depth:
            token = ids[newest + step + 1]
            made *= min(1.0, q[token] / p[token])
            out = model.draft(mx.array([[token]]), out, [state], [newest + step], step + 1)
    return found


@pytest.mark.parametrize("fields", [{}, SPARSE])
def test_is_what_every_position_alone_gives(fields: dict[str, Any]) -> None:
    model: Any = nano_model(sharpness=2.0, **fields)
    text = Text((3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5), begin=4)
    alone = np.array([chances(model, text.ids, newest) for newest in range(4, 9)])
    found = measure(model, {"own": model.mtp}, [text], depth=DEPTH)["own"]
    kept, made = alone[:, :, 0] * alone[:, :, 1], alone[:, :, 1]
    assert np.allclose(found.by_depth, kept.sum(axis=0) / made.sum(axis=0), rtol=1e-4)
    assert found.positions.tolist() == [5]
    assert np.isclose(found.tokens_per_cycle, 1 + kept.sum(axis=1).mean(), rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_so_it_is_in_every_family(name: str, tmp_path: Path) -> None:
    model: Any = build_model(classify(write_checkpoint(FAMILIES[name], tmp_path)), with_head=True).model
    text, depth = Text((3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5), begin=4), min(DEPTH, model.max_depth)
    alone = np.array([chances(model, text.ids, newest, depth) for newest in range(4, 12 - depth)])
    found = measure(model, {"own": model.mtp}, [text], depth=depth)["own"]
    assert np.isclose(found.tokens_per_cycle, 1 + (alone[:, :, 0] * alone[:, :, 1]).sum(axis=1).mean(), rtol=1e-3)


def test_is_what_an_engine_accepts() -> None:
    """Sampled cycles of the engine, by the token-wise rule; the odds of a false alarm are under 1 in 10,000."""
    model = well_drafted_model()
    engine = Engine(model, rule=TOKENWISE)
    asked = SamplingParams(depth=DEPTH, max_tokens=400, temperature=TEMPERATURE).resolved({})
    rows = [engine.add(Request([1, 2, 3, number], asked)) for number in range(4)]
    for row in rows:
        for _ in engine.run(row):
            pass
    texts = [Text((1, 2, 3, number, *row.emitted), 4) for number, row in enumerate(rows)]
    found = measure(model, {"own": model.mtp}, texts, depth=DEPTH)["own"]
    tried, accepted = (
        np.array([getattr(row.statistics, name)[0] for row in rows]).sum() for name in ("tried", "accepted")
    )
    spread = (found.by_depth[0] * (1 - found.by_depth[0]) / tried) ** 0.5
    assert tried > 300
    assert abs(accepted / tried - found.by_depth[0]) < 4 * spread + 0.02  # positions are not drawn alike


def test_the_head_in_place_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nano_model()
    own, other = model.mtp, nano_model(seed=5).mtp
    text = Text((3, 1, 4, 1, 5, 9, 2, 6), begin=3)
    found = measure(model, {"own": own, "other": other}, [text], depth=2)
    assert model.mtp is own
    assert found["own"].tokens_per_cycle != found["other"].tokens_per_cycle
    monkeypatch.setattr(acceptance, "_summary", None)
    with pytest.raises(TypeError):
        measure(model, {"other": other}, [text], depth=2)
    assert model.mtp is own


def test_answers_to_one_prompt_are_counted_together() -> None:
    model: Any = nano_model(sharpness=2.0)
    first, again = Text((3, 1, 4, 1, 5, 9, 2, 6), begin=3), Text((3, 1, 4, 7, 7, 9, 2, 6, 1), begin=3)
    other = Text((3, 1, 2, 7, 7, 9, 2, 6, 1), begin=3)

    def measured(*texts: Text) -> Acceptance:
        return measure(model, {"own": model.mtp}, texts, depth=2)["own"]

    found = measured(first, other, again)
    assert found.positions.tolist() == [4 + 5, 5]
    assert np.isclose(found.expected[0], measured(first).expected[0] + measured(again).expected[0])
    assert np.isclose(found.expected[1], measured(other).expected[0])


def test_differences_have_an_error() -> None:
    """Of a ratio over prompts: two that agree but for their length tell more than two that do not."""
    positions = np.array([10, 30, 20])
    first = Acceptance((0.5,), np.array([25.0, 75.0, 50.0]), positions)
    same = Acceptance((0.5,), np.array([20.0, 60.0, 40.0]), positions)
    assert np.allclose(first.over(same), (0.5, 0))
    torn = Acceptance((0.5,), np.array([15.0, 75.0, 30.0]), positions)
    more, error = first.over(torn)
    assert np.isclose(more, 0.5)
    apart = np.array([10.0 - 5, 0.0 - 15, 20.0 - 10])
    assert np.isclose(error, (1.5 * (apart**2).sum()) ** 0.5 / 60)
    assert first.over(first) == (0, 0)


def test_one_text_tells_no_difference() -> None:
    one = Acceptance((0.5,), np.array([25.0]), np.array([10]))
    assert one.over(one)[1] == np.inf
