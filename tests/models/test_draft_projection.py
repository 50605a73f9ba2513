"""Guards drafting from a part of the vocabulary: it changes which tokens are drafted, and nothing of what is emitted.

The joint law is enumerated in float64 from the laws of a nano model's own trunk and head, so that part has no false
alarms. The engine is then sampled with streams from a counter: a run is deterministic while model and noise stay as
they are (odds of an alarm at a change: 6 p-values below 1e-4).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten

from selfdraft import load
from selfdraft.engine import RULES, Engine, Request, Row, noise
from selfdraft.engine.accept import RejectionRule
from selfdraft.errors import InvalidRequest, NonFiniteLogits
from selfdraft.llm import LLM
from selfdraft.models.draft_projection import LEAST, DraftProjection, draft_fewer, draft_tokens
from selfdraft.models.loader import LoadedModel, quantisation_of
from selfdraft.settings import load_settings
from tests.support.chi_square import against_law
from tests.support.laws import Cycle, Floats, Table, Tokens, joint_law, total_variation, true_law
from tests.support.nano import SMALLER, nano_model, well_drafted_model
from tests.support.rows import finish, fork_rows, params, prefill_all, solo

V = 16
PROMPT = [3, 1, 4]
SOME = [0, 2, 3, 5, 8, 9, 15]
rules = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))

# --- the projection

FORMATS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tie_word_embeddings": True},
    "bfloat16": {"dtype": mx.bfloat16},
    "4-bit": {"bits": 4},
    "8-bit, tied": {"bits": 8, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2)])
def test_logits_are_the_layers_own_and_minus_infinity_outside(form: str, shape: tuple[int, int]) -> None:
    model = nano_model(**FORMATS[form])
    dtype = model.model.norm.weight.dtype
    hidden = mx.random.normal((*shape, model.args.hidden_size), key=mx.random.key(1)).astype(dtype)
    whole = model.logits(hidden)
    model.draft_only(SOME)
    found = model.draft_logits(hidden)
    assert found.shape == whole.shape
    assert found.dtype == whole.dtype
    inside = np.isin(np.arange(V), SOME)
    got, expected = (np.array(each.astype(mx.float32)) for each in (found, whole))
    assert (got[..., ~inside] == -np.inf).all()
    close = 1e-2 if dtype == mx.bfloat16 else 1e-5
    np.testing.assert_allclose(got[..., inside], expected[..., inside], rtol=close, atol=close)
    assert mx.array_equal(model.logits(hidden), whole)  # of the trunk
    model.draft_only(None)
    assert mx.array_equal(model.draft_logits(hidden), whole)


def test_a_bias_is_of_the_same_tokens() -> None:
    layer = nn.Linear(8, V)
    layer.bias = mx.arange(V).astype(mx.float32) * 100
    hidden = mx.zeros((1, 1, 8))
    assert DraftProjection(layer, [2, 7])(hidden)[0, 0, 7].item() == 700


@pytest.mark.parametrize("form", ["dense", "tied", "4-bit"])
def test_the_copy_is_counted_and_no_parameter(form: str) -> None:
    model: Any = nano_model(**FORMATS[form])
    before, formats = dict(tree_flatten(model.parameters())), quantisation_of(model)
    held = model.draft_only(SOME)
    layer = model.model.embed_tokens if form == "tied" else model.lm_head
    assert held == sum(array.nbytes for array in layer.values()) * len(SOME) // V
    assert dict(tree_flatten(model.parameters())).keys() == before.keys()
    assert quantisation_of(model) == formats


# --- which tokens


def test_special_tokens_are_drafted_whatever_the_size() -> None:
    assert draft_tokens(3, 100, {97, 98, 250}) == [0, 1, 2, 97, 98]
    assert draft_tokens(4, 100, {1, 99}) == [0, 1, 2, 3, 99]
    assert draft_tokens(200, 4, {3}) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("size", "drafted"),
    [(0, 600), (1, LEAST), (300, 300), (600, 600), (5000, 600)],  # never end tokens alone: they may be withheld
)
def test_how_many(size: int, drafted: int) -> None:
    model: Any = nano_model(vocab_size=600, **SMALLER)
    loaded = draft_fewer(LoadedModel(model, mx.float32, {}, 1000), size, {1})
    found = model.draft_logits(mx.ones((1, 1, model.args.hidden_size)))
    assert mx.isfinite(found).sum().item() == drafted
    assert loaded.nbytes == 1000 + (0 if drafted == 600 else drafted * model.args.hidden_size * 4)


def test_a_model_without_a_head_holds_nothing() -> None:
    loaded = LoadedModel(nano_model(with_head=False, vocab_size=600, **SMALLER), mx.float32, {}, 1000)
    assert draft_fewer(loaded, 300, ()) is loaded


# --- the joint law, enumerated

FEW = 4
TOKENS = 4


@cache
def tables(drafted: tuple[int, ...]) -> tuple[Table, Table, Table]:
    """p, q over all tokens, and q over `drafted`, for every context behind the prompt."""
    model = nano_model(7, sharpness=2.0, vocab_size=FEW, **SMALLER)
    laws: list[dict[Tokens, Floats]] = [{}, {}, {}]
    for length in range(TOKENS + 1):
        contexts = list(itertools.product(range(FEW), repeat=length))
        whole = mx.array([[3, 1, 2, *context] for context in contexts])
        rows = [model.new_state() for _ in contexts]
        hidden, _ = model.forward(whole, rows, keep_steps=False)
        head = model.draft(whole[:, 1:], hidden[:, :-1], rows, [0] * len(rows))[:, -1:]
        model.draft_only(drafted)
        kinds = model.logits(hidden[:, -1:]), model.logits(head), model.draft_logits(head)
        for table, logits in zip(laws, kinds, strict=True):
            z = np.array(logits[:, 0], dtype=np.float64)
            weights = np.exp(z - z.max(axis=-1, keepdims=True))
            table.update(zip(contexts, weights / weights.sum(axis=-1, keepdims=True), strict=True))
    return laws[0].__getitem__, laws[1].__getitem__, laws[2].__getitem__


def distance(rule: RejectionRule, depth: int, drafted: tuple[int, ...], *, ratio_of_all: bool = False) -> float:
    p, whole, q = tables(drafted)

    def plan(context: Tokens, memory: int, remaining: int) -> list[Cycle]:
        k = max(min(depth, remaining - 1), 0)
        cycles = []
        for drafts in itertools.product(drafted, repeat=k):
            laws = [(whole if ratio_of_all else q)(context + drafts[:i]) for i in range(k)]
            chance = float(np.prod([q(context + drafts[:i])[token] for i, token in enumerate(drafts)]))
            cycles.append(Cycle(context, drafts, chance, k, laws))
        return cycles

    found = joint_law(rule, p, q, plan, FEW, TOKENS)
    return total_variation(found, true_law(p, FEW, TOKENS))


@rules
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("drafted", [(0, 2, 3), (1, 2), (3,)])
def test_the_joint_law_is_exact(rule: RejectionRule, depth: int, drafted: tuple[int, ...]) -> None:
    assert distance(rule, depth, drafted) < 1e-9


@rules
def test_the_law_over_all_tokens_in_the_ratio_is_biased(rule: RejectionRule) -> None:
    """So the check above can fail."""
    assert distance(rule, 2, (1, 2), ratio_of_all=True) > 1e-3


# --- the engine


@pytest.fixture
def counted_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh streams of unseeded rows: a hash of a counter in place of the system's randomness."""
    counter = itertools.count()

    def urandom(size: int) -> bytes:
        return hashlib.blake2b(str(next(counter)).encode(), digest_size=size).digest()

    monkeypatch.setattr(noise, "os", SimpleNamespace(urandom=urandom))


def trunk_law(model: Any, first: int, tokens: int, temperature: float) -> dict[Tokens, float]:
    """The joint law of the tokens behind the first one."""
    done: dict[Tokens, float] = {(): 1.0}
    for _ in range(tokens):
        done, before = {}, done
        whole = mx.array([[*PROMPT, first, *context] for context in before])
        hidden, _ = model.forward(whole, [model.new_state() for _ in before], keep_steps=False)
        z = np.array(model.logits(hidden[:, -1:])[:, 0], dtype=np.float64) / temperature
        weights = np.exp(z - z.max(axis=-1, keepdims=True))
        for (context, chance), law in zip(before.items(), weights / weights.sum(axis=-1, keepdims=True), strict=True):
            done.update({(*context, token): chance * float(law[token]) for token in range(V)})
    return done


@rules
@pytest.mark.usefixtures("counted_streams")
def test_sampled_rows_follow_the_law_of_the_trunk(rule: RejectionRule) -> None:
    model, tokens, rows, temperature = well_drafted_model(sharpness=1.2), 3, 1000, 0.9
    exact = trunk_law(model, 5, tokens, temperature)
    model.draft_only(SOME)
    p_values = {}
    for depth in (1, 2, 3):
        asked = params(depth=depth, temperature=temperature, max_tokens=tokens + 1)
        engine = Engine(model, rule=rule)
        done = fork_rows(engine, PROMPT, 5, [asked] * rows)
        finish(engine)
        p_values[depth] = against_law(Counter(tuple(row.emitted[1:]) for row in done), exact)
        kept, tried = sum(sum(row.statistics.accepted) for row in done), sum(sum(row.statistics.tried) for row in done)
        assert 0.1 < kept / tried < 0.9  # sampling is put to the test
    assert min(p_values.values()) > 1e-4, p_values


def asked(depth: int, constraint: Any = None, prompt: Sequence[int] = PROMPT, **given: Any) -> Request:
    sampling = params(**{"max_tokens": 12, "temperature": 0.0, "depth": depth, **given})
    return Request(prompt, sampling, stop_ids=frozenset([15]), constraint=constraint)


class Only:
    """A constraint that allows the same tokens everywhere."""

    def __init__(self, *tokens: int) -> None:
        self._mask = np.isin(np.arange(V), tokens)

    def allowed(self, drafts: Sequence[int]) -> npt.NDArray[np.bool_]:
        return np.tile(self._mask, (len(drafts) + 1, 1))

    def emit(self, tokens: Sequence[int]) -> None:
        assert self._mask[list(tokens)].all()


COUPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 3},
    "penalties": {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "filters": {"temperature": 1.2, "seed": 5, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "a token outside preferred": {"logit_bias": {7: 100.0}},
    "ends withheld": {"temperature": 1.0, "seed": 6, "min_tokens": 8},
}
CONSTRAINTS = {"none": None, "overlaps": (0, 1, 2, 4, 6), "nothing in common": (1, 4, 6, 7), "one": (12,)}


@pytest.mark.parametrize("how", COUPLED)
@pytest.mark.parametrize("mask", CONSTRAINTS)
@pytest.mark.parametrize("ids", [SOME, [11]], ids=["some", "one"])
def test_text_is_that_of_plain_decoding(how: str, mask: str, ids: list[int]) -> None:
    """Where a grammar leaves nothing of S, too."""
    model = nano_model(sharpness=2.0, **SMALLER)
    allowed = CONSTRAINTS[mask]

    def decoded(depth: int) -> Row:
        return solo(model, asked(depth, Only(*allowed) if allowed else None, **COUPLED[how]))

    plain = decoded(0)
    assert plain.error is None
    model.draft_only(ids)
    row = decoded(3)
    assert row.error is None
    assert (row.emitted, row.finish_reason) == (plain.emitted, plain.finish_reason)
    if mask == "one":  # the position that a grammar masks is drafted from all tokens
        assert row.statistics.accepted[0] == row.statistics.tried[0] > 0


@pytest.mark.usefixtures("counted_streams")
@pytest.mark.parametrize("rule", RULES)
def test_sampled_rows_stay_inside_a_grammar_that_leaves_nothing(rule: str) -> None:
    model = nano_model(sharpness=2.0, **SMALLER)
    model.draft_only(SOME)
    engine = Engine(model, rule=RULES[rule])
    rows = [engine.add(asked(3, Only(1, 4, 6), temperature=1.0)) for _ in range(20)]
    rows += [engine.add(asked(2, temperature=1.0)) for _ in range(5)]  # beside others
    finish(engine)
    assert all(row.error is None and row.emitted for row in rows)
    assert {token for row in rows[:20] for token in row.emitted} == {1, 4, 6}


def test_rows_of_different_depths_side_by_side() -> None:
    model = nano_model(sharpness=2.0, **SMALLER)
    prompts = [[n, 2 * n % V, 3] for n in range(5)]
    plain = [solo(model, asked(0, prompt=prompt)).emitted for prompt in prompts]
    model.draft_only(SOME)
    engine = Engine(model)
    rows = [engine.add(asked(n, prompt=prompt)) for n, prompt in enumerate(prompts)]
    prefill_all(engine)
    finish(engine)
    assert [row.emitted for row in rows] == plain


def test_only_these_tokens_are_drafted() -> None:
    """What the trunk would have chosen is never accepted if it may not be drafted, and as often as ever if it may."""
    model = well_drafted_model(sharpness=4.0)
    request = asked(3, ignore_eos=True)
    whole = solo(model, request)
    assert sum(whole.statistics.accepted) > 0
    used = set(whole.emitted)
    model.draft_only(sorted(set(range(V)) - used))
    assert sum(solo(model, request).statistics.accepted) == 0
    model.draft_only(sorted(used))
    assert sum(solo(model, request).statistics.accepted) >= sum(whole.statistics.accepted)


# --- logits that are no numbers


@pytest.mark.parametrize("where", ["outside S", "inside S", "the head alone"])
@pytest.mark.parametrize("given", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_nan_is_noticed(where: str, given: dict[str, Any]) -> None:
    model = nano_model(sharpness=2.0, **SMALLER)
    if where == "the head alone":
        model.mtp.norm.weight = model.mtp.norm.weight * mx.nan
    else:
        weight = np.array(model.lm_head.weight)
        weight[8 if where == "inside S" else 7] = np.nan
        model.lm_head.weight = mx.array(weight)
    model.draft_only(SOME)
    row = solo(model, asked(2, **given))
    assert isinstance(row.error, NonFiniteLogits)


# --- a loaded model


def test_the_setting_is_kept_and_counted() -> None:
    for size in (-1, 1, 255):
        with pytest.raises(InvalidRequest, match=rf"draft_vocabulary .*256 ids and more; got {size}"):
            load_settings(draft_vocabulary=size)
    whole, few = (load("reference", settings=load_settings(draft_vocabulary=size)) for size in (None, 512))
    special = few.tokenizer.special_ids.union(few.tokenizer.added.values())
    model: Any = few.loaded.model
    weight = model.model.embed_tokens.weight
    assert whole.loaded.model.vocab_size == weight.shape[0]
    held = few.describe()["weights_bytes"] - whole.describe()["weights_bytes"]
    assert held == weight[: 512 + len(special)].nbytes
    hidden = mx.ones((1, 1, weight.shape[1]), dtype=weight.dtype)
    drafted = np.isfinite(np.array(model.draft_logits(hidden)[0, 0].astype(mx.float32)))
    assert set(np.flatnonzero(drafted).tolist()) == {*range(512), *special}
    assert mx.isfinite(whole.loaded.model.draft_logits(hidden)).all().item()

    def text(llm: LLM, depth: int) -> str:
        return llm.generate("Define the word fella.", params(depth=depth, temperature=0.0, max_tokens=20)).text

    assert text(few, 2) == text(whole, 0)
