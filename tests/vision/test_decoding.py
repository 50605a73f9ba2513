"""Guards decoding behind pictures: drafts change nothing but speed, and a row nothing for those beside it.

A nano model and a stand-in for its tower: what matters here is where embeddings and positions go. Fair on MLX's
reference BLAS, where a row of a wide forward has the bits of a one-token forward (tests/conftest.py chooses it).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from selfdraft.device import active_blas
from selfdraft.engine import Engine, Request, Row
from selfdraft.errors import InvalidRequest
from selfdraft.models.few_rows import use_few_row_kernels
from tests.support.budgets import budget_of
from tests.support.nano import FOR_KERNELS, SMALLER, SPARSE, nano_model
from tests.support.plain_kernels import plain_kernels
from tests.support.rows import finish, params
from tests.support.vision import SIGHTED, Sketch, pictured, sketched

pytestmark = pytest.mark.skipif(active_blas() != "reference", reason="bit parity is claimed for reference BLAS only")

KINDS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"dtype": mx.bfloat16}, "4-bit": {"bits": 4}, "experts": SPARSE}
FIRST, SECOND = pictured(3, 4), pictured(5, 2)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def model(kind: dict[str, Any]) -> Any:
    return nano_model(sharpness=2.0, **{**SMALLER, **SIGHTED}, **kind)


@pytest.fixture
def tower(model: Any) -> Sketch:
    return Sketch(model.args.hidden_size)


def requests(tower: Sketch, depth: Any, **given: Any) -> list[Request]:
    """Prompts with two pictures, with one, with the same pictures in the other order, and with none."""
    prompts = [(TEXT, FIRST, [7, 8], SECOND, TEXT), ([2], SECOND, TEXT), (TEXT, SECOND, [7, 8], FIRST, TEXT)]
    asked = [sketched(tower, *parts) for parts in prompts]
    fields = params(**{"temperature": 0.0, "max_tokens": 24, **given, "depth": depth})
    pictured = [Request(tokens, fields, choice=place, inputs=given) for place, (tokens, given) in enumerate(asked)]
    return [*pictured, Request(TEXT * 3, fields)]


def decoded(model: Any, asked: list[Request], *, chunk: int = 64, together: bool = False) -> list[Row]:
    engine, rows = Engine(model, prefill_chunk=chunk), []
    for each in asked:
        rows.append(engine.add(each))
        if not together:
            finish(engine)
    finish(engine)
    assert [row.error for row in rows] == [None] * len(rows)
    return rows


def texts(rows: list[Row]) -> list[list[int]]:
    return [row.emitted for row in rows]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
def test_text_is_the_same_at_every_depth(model: Any, tower: Sketch, sampling: dict[str, Any]) -> None:
    plain = texts(decoded(model, requests(tower, 0, **sampling)))
    assert len({tuple(text) for text in plain}) == 4
    for depth in (1, 2, 3, 5):
        rows = decoded(model, requests(tower, depth, **sampling))
        assert texts(rows) == plain
        for kind in ("draft", "correction"):
            assert sum(row.statistics.emitted[kind] for row in rows) > 0


def test_rows_do_not_depend_on_those_beside_them(model: Any, tower: Sketch) -> None:
    """Text and pictures, one batch: the same tokens and log-probabilities as alone."""
    asked = [each for depth in (3, 0) for each in requests(tower, depth, logprobs=1)]
    alone, together = decoded(model, asked), decoded(model, asked, together=True)
    assert texts(together) == texts(alone)
    assert [row.scores for row in together] == [row.scores for row in alone]


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_prompts_are_cut_inside_of_pictures(model: Any, tower: Sketch, chunk: int) -> None:
    plain = decoded(model, requests(tower, 0, logprobs=1), chunk=chunk)
    assert texts(decoded(model, requests(tower, 3), chunk=chunk)) == texts(plain)
    whole = decoded(model, requests(tower, 0, logprobs=1))
    for row, other in zip(plain, whole, strict=True):  # cuts change low bits alone
        assert row.scores[0].token == other.scores[0].token
        assert row.scores[0].logprob == pytest.approx(other.scores[0].logprob, abs=2e-2)


def test_text_alone_is_what_it_is_without_pictures(model: Any, tower: Sketch, kind: dict[str, Any]) -> None:
    """Bit for bit, on a model of the same weights that knows no pictures."""
    rope = {name: value for name, value in SIGHTED["rope_parameters"].items() if not name.startswith("mrope")}
    blind = nano_model(sharpness=2.0, **{**SMALLER, "rope_parameters": rope}, **kind)
    assert model.takes_pictures
    assert not blind.takes_pictures
    asked = requests(tower, 3, logprobs=1)
    beside, alone = decoded(model, asked, together=True)[-1], decoded(blind, asked[-1:])[0]
    assert (beside.emitted, beside.scores) == (alone.emitted, alone.scores)
    assert beside.state.rope_delta == 0


def test_embeddings_and_places_matter(model: Any, tower: Sketch) -> None:
    """Other pixels, another shape of as many tokens, no embeddings: each gives other logits."""

    def score(picture: Any, *, blank: bool = False) -> float:
        tokens, inputs = sketched(tower, TEXT, picture, TEXT)
        beside = None if blank else inputs
        request = Request(tokens, params(temperature=0.0, max_tokens=1, logprobs=1), inputs=beside)
        return decoded(model, [request])[0].scores[0].logprob

    same = Sketch(model.args.hidden_size)
    square, wide = pictured(4, 3), FIRST
    tower.encode = lambda picture, grid: same.encode(FIRST, grid)  # type: ignore[method-assign]
    found = [score(wide), score(square), score(wide, blank=True)]
    tower.encode = same.encode  # type: ignore[method-assign]
    found.append(score(pictured(3, 4, seed=1)))
    assert len(set(found)) == 4


def test_each_picture_is_encoded_once_in_a_turn_of_its_own(model: Any, tower: Sketch) -> None:
    asked = requests(tower, 3)[0]
    engine = Engine(model, prefill_chunk=64)
    rows = [engine.add(asked), engine.add(asked)]  # two answers to one prompt
    assert (tower.encoded, rows[0].state.length) == ([], 0)
    engine.step()
    assert (tower.encoded, rows[0].state.length) == ([FIRST], 0)
    engine.cancel(rows[0])
    finish(engine)
    assert tower.encoded == [FIRST, SECOND]
    assert rows[1].error is None


def test_memory_is_asked_for(model: Any, tower: Sketch) -> None:
    tokens, inputs = sketched(tower, TEXT, FIRST, [7, 8], SECOND, TEXT)
    request = Request(tokens, params(max_tokens=2))
    budget = budget_of(Engine(model), 10**9)
    plain, need = budget.need(request), budget.need(Request(tokens, params(max_tokens=2), inputs=inputs))
    assert need.state - plain.state == 4 * tower.width * (12 + 10)
    assert need.working == 12 * 10**7 > plain.working


def test_inputs_of_another_prompt_are_refused(model: Any, tower: Sketch) -> None:
    tokens, inputs = sketched(tower, TEXT, FIRST, TEXT)
    with pytest.raises(InvalidRequest, match=f"has {len(tokens) + 1} tokens, and what comes with it is for"):
        Engine(model).add(Request([*tokens, 3], params(max_tokens=2), inputs=inputs))


def test_kernels_take_positions_behind_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of kernels, by stand-ins of theirs: what plain MLX computes, at every depth, side by side."""
    fields = {**FOR_KERNELS, "rope_parameters": {**SIGHTED["rope_parameters"], "mrope_section": [6, 5, 5]}}
    model = nano_model(5, sharpness=2.0, bits=4, **fields)
    tower = Sketch(model.args.hidden_size)
    plain = decoded(model, requests(tower, 0, logprobs=1))
    with monkeypatch.context() as patch:
        plain_kernels(patch)
        use_few_row_kernels(model)
        assert model.model.takes([model.new_state()] * 4, 4)
        for depth in (0, 3):
            rows = decoded(model, requests(tower, depth, logprobs=1), together=True)
            assert texts(rows) == texts(plain)
            for row, other in zip(rows, plain, strict=True):
                found = [[score.logprob for score in each.scores] for each in (row, other)]
                assert found[0] == pytest.approx(found[1], abs=1e-3)
        assert rows[0].state.rope_delta == 4 - 12 + 5 - 10
