"""The device that MLX computes on, the BLAS of a CPU, and the dtypes that models get there."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from .context import Context
from .finding import Finding
from .registry import check

__all__: list[str] = []


@check("device", needs_mlx=True)
def _device(context: Context) -> Iterator[Finding]:
    import mlx.core as mx

    from ..memory import device_memory, gibibytes

    info = mx.device_info()
    on_cpu = mx.default_device() == mx.cpu
    way = "CPU" if on_cpu else "Metal" if mx.metal.is_available() else "CUDA"
    named = ", ".join(str(info[key]) for key in ("device_name", "architecture") if info.get(key))
    observed = f"{way}: {named}, {gibibytes(device_memory())} to use"
    figures = {"back_end": way.lower(), **{key: info[key] for key in sorted(info) if key != "uuid"}}
    if on_cpu and (problem := _unused_gpu()):
        yield Finding("device", "warn", f"{observed}, beside {problem[0]}", "the GPU", problem[1], figures)
    else:
        yield Finding("device", "ok", observed, figures=figures)


def _unused_gpu() -> tuple[str, str] | None:
    """A GPU that MLX does not use, and how it would."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "an Apple GPU", "install mlx anew (pip install --force-reinstall mlx mlx-metal)"
    if shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
        return "an NVIDIA GPU", "install the extra cuda13 of selfdraft in the place of cpu"
    return None


@check("blas", needs_mlx=True)
def _blas(context: Context) -> Iterator[Finding]:
    from ..device import active_blas

    blas = active_blas()
    if context.blas_problem:
        fix = "sudo apt install libopenblas0-pthread (Debian, Ubuntu), or set blas to auto"
        yield Finding("blas", "fail", context.blas_problem, "the BLAS that the settings name", fix)
    elif blas == "reference" and context.settings.blas == "auto":
        yield Finding(
            "blas",
            "warn",
            "MLX's reference BLAS: no OpenBLAS was found",
            "OpenBLAS: several times faster in fp32",
            "sudo apt install libopenblas0-pthread (Debian, Ubuntu; elsewhere the package that has libopenblas.so.0)",
        )
    else:
        yield Finding("blas", "ok", {"system": "MLX's own", "openblas": "OpenBLAS"}.get(blas, "reference, as set"))


@check("dtype", needs_mlx=True)
def _dtype(context: Context) -> Iterator[Finding]:
    import mlx.core as mx

    from ..device import choose_dtype

    wanted = context.settings.dtype
    dense, quantised = (choose_dtype(wanted, quantised=each) for each in (False, True))
    names = [str(each).removeprefix("mlx.core.") if each else "as stored" for each in (dense, quantised)]
    observed = f"dense weights {names[0]}, quantised ones {names[1]}"
    if wanted == "bfloat16" and choose_dtype("auto", quantised=False) == mx.float16:
        fix = "selfdraft settings set dtype auto, and unset SELFDRAFT_DTYPE"
        yield Finding("dtype", "warn", f"{observed}, which this chip emulates", "float16", fix)
    else:
        yield Finding("dtype", "ok", observed)
