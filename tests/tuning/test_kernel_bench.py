"""Guards the benchmark of kernels where they cannot run: operands fit MLX's operations, bytes are counted in full.

Kernels are stood in for by what they replace; their speed is measured on a GPU, and only there.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.tuning import kernel_bench


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(x: mx.array, w: mx.array, s: mx.array, b: mx.array, **form: Any) -> mx.array:
        return mx.quantized_matmul(x, w, s, b, transpose=True, **form)

    def attend(
        q: mx.array, keys: Sequence[mx.array], values: Sequence[mx.array], end: mx.array, *, scale: float
    ) -> mx.array:
        (k,), (v,) = keys, values
        assert end.item() == k.shape[2]
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)

    def recur(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, *_: Any) -> Any:
        return q + 0, state + 0, SimpleNamespace(deltas=v + 0)

    monkeypatch.setattr(kernel_bench.verify_qmv, "verify_qmv", product)
    monkeypatch.setattr(kernel_bench.few_query_attention, "few_query_attention", attend)
    monkeypatch.setattr(kernel_bench.gated_delta_tape, "gated_delta_verify", recur)
    monkeypatch.setattr(kernel_bench, "MATRICES", ((128, 64, 4), (128, 64, 8)))
    monkeypatch.setattr(kernel_bench, "ROWS", (1, 4))
    monkeypatch.setattr(kernel_bench, "LENGTHS", (32,))


@pytest.mark.usefixtures("stood_in")
def test_every_operation_is_timed_against_mlx() -> None:
    rows = {row["what"]: row for row in kernel_bench.kernel_rows(1e9)}
    assert len(rows) == 2 * 2 + 2 + 2
    weights = 64 * 128 // 2 + 2 * 2 * 64 * 128 // 64  # words, and bf16 scales and biases of groups of 64
    assert rows["128 x 64, 4 bits, 4 rows"]["bytes"] == weights + 2 * 4 * (128 + 64)
    assert rows["attention, 1 of 32 tokens"]["bytes"] == 2 * 2 * 4 * 32 * 256 + 2 * 2 * 24 * 256
    for row in rows.values():
        assert row["ours_us"] > 0
        assert row["mlx_us"] > 0
        assert row["share_of_copy"] == pytest.approx(row["bytes"] / (row["ours_us"] * 1e-6) / 1e9, rel=0.2, abs=1e-3)
