"""Guards the dtype that `auto` settles on: one that the processor has."""

from __future__ import annotations

import mlx.core as mx
import pytest

from selfdraft import device
from selfdraft.device import choose_dtype


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
