"""Guards the synthetic models: their shapes are real ones, nothing is left out, and acceptance is what was asked for.

A model whose head is right too often, or whose matrices are skipped, makes every figure measured with it a lie. That
each flag works at its depth, and only there, is checked for every token; rates through the engine are checked against
the binomial error (4 deviations: a false alarm in about 16,000 checks; seeds are fixed, so these do not flicker).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from selfdraft.engine import RULES, Engine, Row
from selfdraft.engine.cycle import Cycle
from selfdraft.errors import InvalidRequest
from selfdraft.models.qwen3_5 import Qwen35, Qwen35Args
from selfdraft.tuning.synthetic import DEPTHS, PUBLISHED_ACCEPTANCE, SHAPES, SyntheticModel, synthetic, tokens_per_cycle
from tests.support.rows import finish, prefill_all, request

LOWER = (0.9, 0.6, 0.8)  # not monotone: flags of different depths are independent
SAMPLED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
SETTINGS = {"published": PUBLISHED_ACCEPTANCE, "lower": LOWER}


@pytest.fixture(scope="module")
def models() -> dict[str, SyntheticModel]:
    """In fp32, which MLX's CPU kernels multiply five times as fast as bf16."""
    return {name: synthetic("tiny", asked, dtype=mx.float32) for name, asked in SETTINGS.items()}


def decode(
    built: SyntheticModel, prompts: Sequence[Sequence[int]], count: int, *, rule: str = "block", **given: Any
) -> list[Row]:
    engine = Engine(built.model, cycle=Cycle(built.model, RULES[rule]))
    # Each its own noise: rows of one seed that ever meet in a cluster say the same from then on, and count twice.
    rows = [
        engine.add(request(prompt, choice=choice, max_tokens=count, **{"temperature": 0.0, **given}))
        for choice, prompt in enumerate(prompts)
    ]
    prefill_all(engine)
    finish(engine)
    assert all(row.error is None for row in rows)
    return rows


def counted(rows: Sequence[Row], depth: int) -> tuple[list[int], list[int]]:
    """Drafts tried and accepted at each position, all rows together."""
    tried, accepted = [0] * depth, [0] * depth
    for row in rows:
        for i, (t, a) in enumerate(zip(row.statistics.tried, row.statistics.accepted, strict=True)):
            tried[i] += t
            accepted[i] += a
    return tried, accepted


def check_acceptance(rows: Sequence[Row], asked: Sequence[float], depth: int) -> None:
    """Conditional acceptance of every position, and tokens of a full cycle, within 4 standard deviations."""
    tried, accepted = counted(rows, depth)
    for position in range(depth):
        rate = asked[min(position, len(asked) - 1)]
        deviation = math.sqrt(rate * (1 - rate) / tried[position])
        assert abs(accepted[position] / tried[position] - rate) < 4 * deviation, (position, tried, accepted)
    # A row's last cycle may be cut to what it may still emit: it is full if at most half a cycle per row is missing.
    per_cycle = 1 + sum(accepted) / tried[0]
    padded = [*asked, *[asked[-1]] * depth]
    variance = sum((2 * k + 1) * math.prod(padded[: k + 1]) for k in range(depth))
    variance -= (tokens_per_cycle(padded, depth) - 1) ** 2
    allowed = 4 * math.sqrt(variance / tried[0]) + depth * len(rows) / (2 * tried[0])
    assert abs(per_cycle - tokens_per_cycle(padded, depth)) < allowed


@pytest.mark.parametrize("name", SETTINGS)
def test_the_head_is_wrong_where_it_is_flagged_and_nowhere_else(models: dict[str, SyntheticModel], name: str) -> None:
    """Every token at every depth that has a rate of its own, and one more."""
    built, planted = models[name], models[name].planted
    model = built.model
    tokens = mx.arange(planted.tokens)[None]
    state = model.new_state()
    hidden, _ = model.forward(tokens, [state], keep_steps=False)
    trunk = model.logits(hidden)
    assert np.array_equal(np.argmax(np.array(trunk[0]), axis=-1), planted.successor[: planted.tokens])
    for depth in range(len(SETTINGS[name]) + 1):
        # What came before does not matter but for the depth it tells: here every token follows itself.
        hidden = model.draft(tokens, hidden, [state], [0])
        drafted = model.logits(hidden)
        assert mx.isfinite(drafted).all().item()
        flagged = planted.flagged[depth, : planted.tokens]
        expected = np.where(flagged, planted.tokens + depth, planted.successor[: planted.tokens])
        assert np.array_equal(np.argmax(np.array(drafted[0]), axis=-1), expected)
        assert mx.abs(drafted - trunk)[..., : planted.tokens].max().item() < 1e-4
        rivals = np.array(drafted[0])[~flagged][:, planted.tokens :]
        assert rivals.max() <= 1e-3
        assert flagged.mean() == pytest.approx(1 - planted.acceptance[depth], abs=0.5 / planted.tokens)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_the_head_has_the_trunks_logits(dtype: mx.Dtype) -> None:
    """To the bit, so that p = q where no flag is. Only the reserved ids differ. (fp32 norms divide by 1 + eps.)"""
    built = synthetic("tiny", dtype=dtype)
    model = built.model
    tokens = mx.arange(0, 900, 30)[None]
    state = model.new_state()
    hidden, _ = model.forward(tokens, [state], keep_steps=False)
    trunk = model.logits(hidden)
    for _ in range(3):
        hidden = model.draft(tokens, hidden, [state], [0])
        assert mx.array_equal(model.logits(hidden)[..., :-DEPTHS], trunk[..., :-DEPTHS]).item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_logits_are_the_planted_ones(dtype: mx.Dtype) -> None:
    built = synthetic("tiny", seed=3, dtype=dtype)
    prompt = [7, 300, 1000, 1020]  # the last is one of the head's wrong drafts: it may stand in a prompt
    hidden, _ = built.model.forward(mx.array([prompt]), [built.model.new_state()], keep_steps=True)
    assert hidden.dtype == built.dtype == dtype
    logits = np.array(built.model.logits(hidden).astype(mx.float32))[0]
    assert np.isfinite(logits).all()
    for position, token in enumerate(prompt):
        law = built.planted.logits(token)
        assert len(law) == 8
        for following, value in law.items():
            assert logits[position, following] == pytest.approx(value, abs=1e-3)
        rest = np.delete(logits[position], list(law))
        assert rest.max() < min(law.values()) - 6  # noise: sampled at T = 0.6 with e^-10 of the least likely
        assert max(law, key=law.__getitem__) == built.planted.successor[token]


def test_the_process_is_one_cycle(models: dict[str, SyntheticModel]) -> None:
    planted = models["lower"].planted
    assert sorted([0, *planted.greedy(0, planted.tokens - 1)]) == list(range(planted.tokens))
    assert planted.greedy(0, planted.tokens)[-1] == 0


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
def test_greedy_text_is_planted_at_every_depth(depth: int) -> None:
    """In bf16, as the large shapes are."""
    built = synthetic("tiny")
    (row,) = decode(built, [[5, 1000, 77]], 40, depth=depth)
    assert row.emitted == built.planted.greedy(77, 40)


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_acceptance(models: dict[str, SyntheticModel], name: str) -> None:
    built, asked = models[name], SETTINGS[name]
    starts = [[token] for token in range(3, 1000, 200)]
    rows = decode(built, starts, 160, depth=len(asked))
    assert all(row.emitted == built.planted.greedy(*start, 160) for row, start in zip(rows, starts, strict=True))
    check_acceptance(rows, asked, len(asked))


@pytest.mark.parametrize(
    ("name", "rule", "given"),
    [("published", "block", {}), ("lower", "tokenwise", {}), ("lower", "block", {"seed": 5})],
    ids=["published, block", "lower, token-wise", "lower, seeded"],
)
def test_sampled_acceptance(models: dict[str, SyntheticModel], name: str, rule: str, given: dict[str, Any]) -> None:
    """The same rates as greedy, whatever the rule: every draft is surely kept or surely rejected."""
    built, asked = models[name], SETTINGS[name]
    starts = [[token] for token in range(3, 1000, 200)]
    mx.random.seed(1)
    rows = decode(built, starts, 160, rule=rule, depth=len(asked), **SAMPLED, **given)
    check_acceptance(rows, asked, len(asked))
    pairs = [pair for row in rows for pair in itertools.pairwise(row.emitted)]
    off = [following != built.planted.successor[token] for token, following in pairs]
    # Filters leave the top, 0.824, and the two likeliest flips: 0.824 / 0.972 of the draws are the top.
    assert np.mean(off) == pytest.approx(0.152, abs=4 * math.sqrt(0.152 * 0.848 / len(off)))
    assert all(following in built.planted.logits(token) for token, following in pairs)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_matrix_is_missing(shape: str) -> None:
    """Names and shapes are those of Qwen35 built from the config and quantised: lazily, so no weight is computed."""
    module = Qwen35(Qwen35Args.from_config(SHAPES[shape].config()), True)
    elements = sum(x.size for name, x in tree_flatten(module.parameters()) if not name.startswith("mtp."))
    nn.quantize(module, group_size=64, bits=4)
    expected = dict(tree_flatten(module.parameters()))
    gibibytes = sum(x.nbytes for x in expected.values()) / 2**30
    if shape == "27b":  # 27.8 billion by the size of the public files, which hold a vision tower and the head too
        assert elements == pytest.approx(26.9e9, rel=0.01)
        assert 14 < gibibytes < 16
    elif shape == "9b":  # what public builds report
        assert elements == pytest.approx(8.95e9, rel=0.003)
    else:
        built = synthetic(shape)
        got = dict(tree_flatten(built.model.parameters()))  # type: ignore[attr-defined]
        assert {name: x.shape for name, x in got.items()} == {name: x.shape for name, x in expected.items()}
        assert sum(name.endswith(".scales") for name in got) == built.quantisation["4-bit group 64"]
        assert set(built.quantisation) == {"4-bit group 64"}
        assert built.nbytes == sum(x.nbytes for x in got.values())
        assert {x.dtype for name, x in got.items() if not name.endswith((".weight", "A_log"))} == {mx.bfloat16}


def test_every_matrix_is_used() -> None:
    """With the output projections audible, other packed words in any one matrix change what trunk or head put out."""
    module: Any = synthetic("tiny", dtype=mx.float32).model
    for _, layer in module.named_modules():
        if isinstance(layer, nn.QuantizedLinear) and not mx.abs(layer.scales).max().item():
            layer.scales = mx.full(layer.scales.shape, 0.02)
            layer.biases = mx.full(layer.biases.shape, -0.15)

    def outputs() -> list[np.ndarray[Any, Any]]:
        tokens = mx.array([[7, 300, 1000]])
        state = module.new_state()
        hidden, _ = module.forward(tokens, [state], keep_steps=True)
        drafted = module.draft(tokens, hidden, [state], [0])
        return [np.array(x) for x in (module.logits(hidden), module.logits(drafted))]

    before, matrices = outputs(), 0
    assert all(np.isfinite(x).all() for x in before)
    for path, layer in module.named_modules():
        if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
            words = layer.weight
            layer.weight = words ^ 0x5A5A5A5A
            assert any(not np.array_equal(x, y) for x, y in zip(before, outputs(), strict=True)), path
            layer.weight = words
            matrices += 1
    assert matrices == 41  # 3 layers of 8, the attention layer of 7, the head of 8, embedding and projection


def test_activations_stay_of_order_one() -> None:
    """What each silent projection is fed is finite, and neither vanishes nor explodes (27b has 64 such layers)."""
    module: Any = synthetic("tiny", dtype=mx.float32).model
    seen: list[float] = []

    class Listening(nn.Module):
        def __call__(self, x: mx.array) -> mx.array:
            seen.append(mx.sqrt((x * x).mean()).item())
            return mx.zeros((*x.shape[:-1], SHAPES["tiny"].hidden))

    for layer in [*module.model.layers, *module.mtp.layers]:
        layer.mlp.down_proj = Listening()
        if "linear_attn" in layer:
            layer.linear_attn.out_proj = Listening()
        else:
            layer.self_attn.o_proj = Listening()
    tokens = mx.arange(64)[None]
    state = module.new_state()
    hidden, _ = module.forward(tokens, [state], keep_steps=False)
    mx.eval(module.draft(tokens, hidden, [state], [0]))
    assert len(seen) == 10
    assert all(0.02 < size < 10 for size in seen), seen


def test_seeds_and_labels() -> None:
    one, same, other = (synthetic("tiny", (0.9,), seed=seed) for seed in (1, 1, 2))
    assert one.label == "SYNTHETIC (tiny shape, random 4-bit weights, planted acceptance 90.0%)"
    assert one.planted.acceptance == (0.9,) * 8
    a, b, c = (dict(tree_flatten(x.model.parameters())) for x in (one, same, other))  # type: ignore[attr-defined]
    assert all(mx.array_equal(a[name], b[name]).item() for name in a)
    packed = [name for name in a if a[name].dtype == mx.uint32]
    assert all(not mx.array_equal(a[name], c[name]).item() for name in packed)


def test_tokens_per_cycle() -> None:
    assert tokens_per_cycle((0.5, 0.5, 0.5), 0) == 1
    assert tokens_per_cycle((0.5, 0.5, 0.5), 3) == 1 + 0.5 + 0.25 + 0.125
    assert tokens_per_cycle(PUBLISHED_ACCEPTANCE, 3) == pytest.approx(3.724, abs=1e-3)


@pytest.mark.parametrize("acceptance", [(), (0.5,) * 9, (1.1,), (-0.1,), (float("nan"),)])
def test_acceptance_out_of_range(acceptance: tuple[float, ...]) -> None:
    with pytest.raises(InvalidRequest, match="acceptance must be 1 to 8 numbers"):
        synthetic("tiny", acceptance)


def test_shapes_that_cannot_carry_it() -> None:
    with pytest.raises(InvalidRequest, match="no synthetic shape 'huge'; known: 27b, 9b, tiny"):
        synthetic("huge")
    with pytest.raises(InvalidRequest, match="hidden size of 128"):
        synthetic(dataclasses.replace(SHAPES["tiny"], hidden=128))
    with pytest.raises(InvalidRequest, match="vocabulary of 1001"):
        synthetic(dataclasses.replace(SHAPES["tiny"], vocabulary=1001))
