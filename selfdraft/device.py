"""Which processor, BLAS and dtype a model runs with. Imports MLX only where it must already be loaded.

The CPU wheel of mlx links reference BLAS. A BLAS opened with global symbol visibility BEFORE the first
`import mlx.core` takes its place: OpenBLAS is several times faster in fp32 (docs/log.md has the figures).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import platform
import sys
from functools import cache
from typing import TYPE_CHECKING, Literal

from .errors import InvalidRequest

if TYPE_CHECKING:
    import mlx.core as mx

__all__ = ["Blas", "Dtype", "active_blas", "choose_blas", "choose_dtype"]

Blas = Literal["auto", "openblas", "reference"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]

_state: dict[str, str] = {}


def choose_blas(wanted: Blas) -> str:
    """Open OpenBLAS for MLX's CPU back end where that helps, and let a CUDA one queue more at once.

    Call before MLX is imported.

    The choice holds for the process: once MLX is loaded it cannot change.

    Returns:
        "openblas", "reference", or "system" where MLX brings its own (macOS, CUDA builds).

    Raises:
        SelfdraftError: one was asked for by name and is not what runs.
    """
    from .errors import SelfdraftError

    if "blas" not in _state and "mlx.core" not in sys.modules:
        _state["blas"] = _open(wanted)
        if _cuda_wheel():
            # MLX launches a graph for every 100 operations there, and waits while ten of them are on their way; a cycle
            # has 500 and more. Whatever the user set stays.
            os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", "1000")
    elif "blas" not in _state:
        _state["blas"] = "reference" if _cpu_wheel() else "system"
    if wanted == "openblas" and _state["blas"] != "openblas":
        raise SelfdraftError(
            "blas=openblas was asked for, but OpenBLAS is not in use: install it "
            "(Debian: apt install libopenblas0-pthread) and start a new process"
        )
    if wanted == "reference" and _state["blas"] == "openblas":
        raise SelfdraftError(
            "blas=reference was asked for, but this process runs on OpenBLAS already; start a new process"
        )
    return _state["blas"]


def active_blas() -> str:
    """What `choose_blas` settled on, or what MLX links when it was never called."""
    return _state.get("blas", "reference" if _cpu_wheel() else "system")


def _cpu_wheel() -> bool:
    """The Linux wheel without a GPU; on macOS MLX uses Accelerate, and with CUDA the host BLAS hardly matters."""
    return platform.system() == "Linux" and importlib.util.find_spec("mlx") is not None and not _cuda_wheel()


@cache
def _cuda_wheel() -> bool:
    from importlib.metadata import distributions

    return any((dist.metadata["Name"] or "").lower().startswith("mlx-cuda") for dist in distributions())


def _open(wanted: Blas) -> str:
    if not _cpu_wheel():
        return "system"
    if wanted == "reference":
        return "reference"
    for name in ("libopenblas.so.0", ctypes.util.find_library("openblas")):
        try:
            if name:
                ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
                return "openblas"
        except OSError:
            continue
    return "reference"


def choose_dtype(wanted: Dtype, *, quantised: bool, dense_experts: bool = False) -> mx.Dtype | None:
    """The dtype of floating tensors, and so of activations; None keeps what the checkpoint stores.

    Args:
        dense_experts: whether it has experts that are not quantised: MLX takes these on a CPU in fp32 alone.

    On a CPU quantised products are 6 to 10 times faster with fp32 activations, dense fp32 is faster than bf16 with
    OpenBLAS, and dense bf16 is faster than fp32 with reference BLAS (docs/log.md has the figures). Apple's M1 and M2
    emulate bf16 and have fp16.

    Raises:
        InvalidRequest: MLX cannot compute in the dtype that is wanted.
    """
    import mlx.core as mx

    on_cpu = mx.default_device() == mx.cpu
    if wanted != "auto":
        if on_cpu and dense_experts and wanted != "float32":
            raise InvalidRequest(
                f"dtype {wanted} is not possible here: on a CPU MLX computes experts that are not quantised in "
                "float32 alone; take float32 or auto",
                param="dtype",
            )
        dtype: mx.Dtype = getattr(mx, wanted)
        return dtype
    if on_cpu:
        return mx.float32 if quantised or dense_experts or active_blas() == "openblas" else None
    return mx.float16 if _emulates_bfloat16() else None


def _emulates_bfloat16() -> bool:
    """M1 and M2, whose architectures Metal names applegpu_g13 and applegpu_g14."""
    import mlx.core as mx

    return str(mx.device_info().get("architecture", "")).startswith(("applegpu_g13", "applegpu_g14"))
