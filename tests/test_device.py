"""Guards the dtype that `auto` settles on: one that the processor has."""

from __future__ import annotations

import os
import sys

import mlx.core as mx
import pytest

from selfdraft import device
from selfdraft.device import choose_dtype
from selfdraft.errors import InvalidRequest


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("applegpu_g13s", mx.float16),
        ("applegpu_g14d", mx.float16),
        ("applegpu_g15p", None),
        ("applegpu_g16s", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("quantised", [False, True])
def test_no_gpu_runs_a_dtype_that_it_emulates(
    monkeypatch: pytest.MonkeyPatch, architecture: str, expected: mx.Dtype | None, quantised: bool
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": architecture})
    assert choose_dtype("auto", quantised=quantised) == expected
    assert choose_dtype("bfloat16", quantised=quantised) == mx.bfloat16


@pytest.mark.parametrize(
    ("blas", "quantised", "expected"),
    [("openblas", False, mx.float32), ("reference", False, None), ("reference", True, mx.float32)],
)
def test_a_cpu_runs_what_is_fast_there(
    monkeypatch: pytest.MonkeyPatch, blas: str, quantised: bool, expected: mx.Dtype | None
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    monkeypatch.setattr(device, "active_blas", lambda: blas)
    assert choose_dtype("auto", quantised=quantised) == expected


@pytest.mark.parametrize(("cuda", "before", "expected"), [(True, None, "1000"), (True, "7", "7"), (False, None, None)])
def test_mlx_queues_a_whole_cycle_on_cuda_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, before: str | None, expected: str | None
) -> None:
    """It reads the variable when it is imported."""
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", before or "")
    if before is None:
        monkeypatch.delenv("MLX_MAX_OPS_PER_BUFFER")
    monkeypatch.setattr(device, "_state", {})
    monkeypatch.setattr(device, "_cuda_wheel", lambda: cuda)
    monkeypatch.setattr(device, "_open", lambda wanted: "system")
    monkeypatch.delitem(sys.modules, "mlx.core")
    device.choose_blas("auto")
    assert os.environ.get("MLX_MAX_OPS_PER_BUFFER") == expected


def test_dense_experts_are_computed_in_fp32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's product of chosen experts takes no other dtype there."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    monkeypatch.setattr(device, "active_blas", lambda: "reference")
    assert choose_dtype("auto", quantised=False, dense_experts=True) == mx.float32
    assert choose_dtype("float32", quantised=False, dense_experts=True) == mx.float32
    with pytest.raises(InvalidRequest, match=r"bfloat16.*float32"):
        choose_dtype("bfloat16", quantised=False, dense_experts=True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert choose_dtype("bfloat16", quantised=False, dense_experts=True) == mx.bfloat16
