"""Guards projections that are put together: the bits of separate ones, held once, and only those that fit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from selfdraft.kernels import verify_qmv
from selfdraft.models import few_rows as subject
from selfdraft.models.few_rows import FewRowsEmbedding, FewRowsLinear, GatedMLP, added, joined, use_few_row_kernels
from selfdraft.models.few_tokens import FewTokens
from selfdraft.models.qwen3_5 import Qwen35
from tests.support.checkpoints import load_folder, outputs
from tests.support.host_kernels import kernels_on_host, needs_compiler
from tests.support.nano import nano_model, write_checkpoint
from tests.support.plain_kernels import plain_kernels

Choice = Callable[[str], dict[str, Any] | bool]
FORM: dict[str, Any] = {"group_size": 32, "bits": 4}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_kernels(monkeypatch)


def linear(outputs: int, seed: int, dtype: mx.Dtype = mx.float32, **form: Any) -> FewRowsLinear:
    layer = nn.Linear(64, outputs, bias=form.pop("bias", False))
    layer.weight = mx.random.normal(layer.weight.shape, key=mx.random.key(seed)).astype(dtype)
    whole = nn.Sequential(layer)
    nn.quantize(whole, **{**FORM, **form})
    use_few_row_kernels(whole)
    found = whole.layers[0]
    assert type(found) is FewRowsLinear
    return found


def inputs(rows: int, dtype: mx.Dtype = mx.float32, width: int = 64) -> mx.array:
    return mx.random.normal((1, rows, width), key=mx.random.key(rows)).astype(dtype)


def assert_same_bits_as_separate(dtype: mx.Dtype, rows: int, bits: int) -> None:
    layers = [linear(size, size, dtype, bits=bits) for size in (48, 16, 10)]
    whole = joined(layers)
    assert whole is not None
    x = inputs(rows, dtype)
    together = mx.split(whole(x), [48, 64], axis=-1)
    assert all(mx.array_equal(mine, layer(x)) for mine, layer in zip(together, layers, strict=True))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 7, 64, 65])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_joined_layers_give_the_bits_of_separate_ones(plain: None, dtype: mx.Dtype, rows: int, bits: int) -> None:
    """65 rows are more than the kernel takes."""
    assert_same_bits_as_separate(dtype, rows, bits)


@needs_compiler
def test_so_they_do_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_on_host(monkeypatch)
    monkeypatch.setattr(verify_qmv, "backend", lambda: "host")
    monkeypatch.setattr(type(verify_qmv.CHECK), "passed", property(lambda check: check is verify_qmv.CHECK))
    assert_same_bits_as_separate(mx.bfloat16, 3, 4)


@pytest.mark.parametrize(
    "other",
    [{"bits": 8}, {"group_size": 64}, {"dtype": mx.bfloat16}, {"bias": True}],
    ids=lambda other: next(iter(other)),
)
def test_layers_of_two_forms_are_not_joined(plain: None, other: dict[str, Any]) -> None:
    assert joined([linear(16, 0), linear(16, 1)]) is not None
    assert joined([linear(16, 0), linear(16, 1, **other)]) is None
    assert joined([linear(16, 0, **other), linear(16, 1)]) is None


def test_layers_that_no_kernel_serves_are_not_joined(plain: None) -> None:
    assert joined([nn.Linear(64, 16, bias=False)] * 2) is None
    assert joined([nn.QuantizedLinear(64, 16, bias=False, **FORM)] * 2) is None


def test_a_bias_is_added_to_the_product_and_the_sum_to_the_residual(plain: None) -> None:
    layer = linear(64, 3, bias=True)
    layer.bias = mx.arange(64) / 8
    x = inputs(5)
    without = verify_qmv.verify_qmv(x, layer.weight, layer.scales, layer.biases, **FORM)  # type: ignore[arg-type]
    assert mx.array_equal(layer(x), without + layer.bias)
    assert mx.array_equal(added(layer, x, 2 * x), 2 * x + (without + layer.bias))


def quantised(choose: Choice, **config: Any) -> Qwen35:
    """A model of which `choose` says by path how a layer is quantised."""
    model = nano_model(1, **config)
    nn.quantize(model, **FORM, class_predicate=lambda path, layer: hasattr(layer, "to_quantized") and choose(path))
    return model


def together(model: Any) -> set[str]:
    """Which projections are put together, layer by layer."""
    found = set()
    for path, part in model.named_modules():
        for name in ("qkv_proj", "in_proj"):
            if name in part:
                found.add(f"{path}.{name}")
        if isinstance(part, GatedMLP):
            found.add(f"{path}.gate_up_proj")
    return found


ALL = {
    "model.layers.0.linear_attn.in_proj",
    "model.layers.0.mlp.gate_up_proj",
    "model.layers.1.self_attn.qkv_proj",
    "model.layers.1.mlp.gate_up_proj",
    "model.layers.2.linear_attn.in_proj",
    "model.layers.2.mlp.gate_up_proj",
    "mtp.layers.0.self_attn.qkv_proj",
    "mtp.layers.0.mlp.gate_up_proj",
}
EIGHT = {"group_size": 32, "bits": 8}
CASES: dict[str, tuple[Choice, dict[str, Any], set[str]]] = {
    "all": (lambda path: True, {}, ALL),
    "dense": (lambda path: False, {}, set()),
    "head": (lambda path: "mtp" in path, {}, {name for name in ALL if "mtp" in name}),
    "trunk": (lambda path: "mtp" not in path, {}, {name for name in ALL if "mtp" not in name}),
    "values in 8 bits": (
        lambda path: EIGHT if path == "model.layers.1.self_attn.v_proj" else True,
        {},
        ALL - {"model.layers.1.self_attn.qkv_proj"},
    ),
    "gates dense": (
        lambda path: not path.endswith(("in_proj_a", "in_proj_b")),
        {},
        {name for name in ALL if "linear_attn" not in name},
    ),
    "up in 8 bits": (
        lambda path: EIGHT if path == "model.layers.2.mlp.up_proj" else True,
        {},
        ALL - {"model.layers.2.mlp.gate_up_proj"},
    ),
    "attention with biases": (
        lambda path: True,
        {"attention_bias": True},
        {name for name in ALL if "self_attn" not in name},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_put_together_computes_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same model before, both by MLX's own products: on a CPU, an output is summed alike in both."""
    choose, config, expected = CASES[case]
    model = quantised(choose, **config)
    before = outputs(model)
    mx.eval(before)
    with monkeypatch.context() as patch:
        patch.setattr(type(verify_qmv.CHECK), "passed", property(lambda check: check is verify_qmv.CHECK))
        use_few_row_kernels(model)
        patch.setattr(verify_qmv, "fits", lambda *given: False)
        assert together(model) == expected
        assert all(mx.array_equal(mine, other) for mine, other in zip(outputs(model), before, strict=True))


def test_an_embedding_that_projects_is_served_too(plain: None) -> None:
    model = quantised(lambda path: True, tie_word_embeddings=True)
    use_few_row_kernels(model)
    embedding: Any = model.model.embed_tokens
    assert isinstance(embedding, FewRowsEmbedding)
    x = inputs(3)
    expected = verify_qmv.verify_qmv(x, embedding["weight"], embedding["scales"], embedding["biases"], **FORM)
    assert mx.array_equal(model.logits(x), expected)


def test_nothing_is_put_together_where_the_kernel_is_not_used() -> None:
    model: Any = quantised(lambda path: True)
    use_few_row_kernels(model)
    assert together(model) == set()
    assert type(model.lm_head) is nn.QuantizedLinear


LARGE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "layer_types": None}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    config = {**LARGE, "full_attention_interval": 2, "head_dim": 64}
    yield write_checkpoint(tmp_path_factory.mktemp("large"), nano_model(bits=4, **config), config=config)
    mx.clear_cache()


def test_weights_that_are_put_together_are_held_once(large: Path, plain: None) -> None:
    """While a model is loaded too: a piece of it is there twice, never all of it."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = load_folder(large)
    assert len(together(loaded.model)) == 6 + 6 + 2
    gc.collect()
    assert loaded.nbytes > 10 * 2**20
    assert mx.get_active_memory() - before < 1.02 * loaded.nbytes
    assert mx.get_peak_memory() - before < 1.2 * loaded.nbytes


@pytest.mark.parametrize("rows", [subject._DENSE - 1, subject._DENSE])
def test_many_rows_are_a_dense_product_on_cuda(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """MLX's quantised product is four times slower there; with fewer rows unpacking costs more than it saves."""
    layer = nn.QuantizedLinear(64, 32, bias=False)
    x, stock, calls = mx.random.normal((1, rows, 64)), mx.quantized_matmul, []

    def counted(*args: Any, **how: Any) -> mx.array:
        calls.append(1)
        return stock(*args, **how)

    monkeypatch.setattr(subject, "backend", lambda: "cuda")
    monkeypatch.setattr(mx, "quantized_matmul", counted)
    found = subject._product(layer, x)
    assert len(calls) == (rows < subject._DENSE)
    assert mx.allclose(found, layer(x), atol=1e-4).item()


def test_no_layers_leave_what_came_in() -> None:
    """A head may have none."""
    few = FewTokens([], lambda x: x, lambda x: x)
    out, left = few([inputs(2)], (), (), [3], [0], 2, mx.float32)
    assert mx.array_equal(out, inputs(2))
    assert left == []
