"""Compiles texts for CUDA into the folder where MLX looks for compiled kernels, once for all processes.

MLX compiles a custom kernel in every process, with headers that no text here needs: 2 to 9 s each, where this takes
0.2 to 0.8. Knows NVRTC, and MLX's names and signatures (mlx/backend/cuda/custom_kernel.cpp and jit_module.cpp of 0.32):
where they are others, MLX does not find what lies here, and compiles it itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import platformdirs

__all__ = ["OWN_HEADER", "Signature", "compile_ahead", "cubin", "folder", "mlx_source", "module_name"]

log = logging.getLogger(__name__)

_FOLDER = "MLX_PTX_CACHE_DIR"  # MLX reads it once, when it first needs a compiled kernel
_MASK = (1 << 64) - 1

# What MLX puts before a text, and what stands there here.
_MLX_HEADER = '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
OWN_HEADER = """
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
namespace cooperative_groups {}
namespace mlx::core::cu {
struct Shape { int32_t sizes[10]; __device__ int32_t operator[](int i) const { return sizes[i]; } };
}
"""
_TYPES = {
    mx.bool_: "bool",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
}


@dataclass(frozen=True)
class Signature:
    """What a kernel is called with: its name, and names and dtypes of its arrays; inputs of one axis or more."""

    name: str
    inputs: tuple[tuple[str, mx.Dtype], ...]
    outputs: tuple[tuple[str, mx.Dtype], ...]


class _Failed(Exception):
    """NVRTC's own words."""


def compile_ahead(signature: Signature, header: str, body: str) -> None:
    """See to it that MLX finds a kernel compiled; if that cannot be, it compiles the kernel itself.

    Args:
        header, body: as handed to `mx.fast.cuda_kernel`.
    """
    source = mlx_source(signature, header, body)
    kept = folder()
    if kept is None:
        return
    where = kept / module_name(signature, source)
    try:
        if _is_code(where.with_suffix(".ptx")):
            return
        code, symbol = cubin(signature, source, _architecture())
        where.parent.mkdir(parents=True, exist_ok=True)
        # MLX looks for the code first: the name of what is in it must be there by then.
        _put(where.with_suffix(".txt"), f"{_qualified(signature)}\t{symbol}\n".encode())
        _put(where.with_suffix(".ptx"), code)
    except (OSError, AttributeError, ValueError, _Failed) as failure:  # the library is not here, or another one
        log.info("kernel %s is left to MLX to compile: %s", signature.name, failure)


def folder() -> Path | None:
    """Where MLX looks: MLX_PTX_CACHE_DIR, which is set to a folder of the user's own for this GPU if it is not.

    None where it is empty, with which MLX keeps nothing. Where the user's folder cannot be written to, it is MLX's.
    """
    if _FOLDER not in os.environ:
        own = platformdirs.user_cache_path("selfdraft") / "cuda" / f"mlx-{version('mlx')}-{_architecture()}"
        if not _writable(own):
            return Path(tempfile.gettempdir()) / "mlx" / version("mlx") / "ptx"
        os.environ[_FOLDER] = str(own)
    return Path(os.environ[_FOLDER]) if os.environ[_FOLDER] else None


def mlx_source(signature: Signature, header: str, body: str) -> str:
    """The text that MLX makes of a kernel's header and body, letter for letter: it finds kernels by its hash."""
    arguments = []
    for name, dtype in signature.inputs:
        arguments.append(f"    const {_TYPES[dtype]}* {name}")
        if f"{name}_shape" in body:
            arguments.append(f"    const __grid_constant__ Shape {name}_shape")
    arguments += [f"    {_TYPES[dtype]}* {name}" for name, dtype in signature.outputs]
    return (
        f"{_MLX_HEADER}{header}namespace mlx::core::cu {{\n\nnamespace cg = cooperative_groups;\n\n"
        f"__global__ void custom_kernel_{signature.name}(\n"
        + ",\n".join(arguments)
        + f") {{\n{body}\n}}\n\n}} // namespace mlx::core::cu\n"
    )


def module_name(signature: Signature, source: str) -> str:
    """Under which MLX looks for it."""
    return f"custom_kernel_{signature.name}_{_standard_hash(source.encode()):x}"


def cubin(signature: Signature, source: str, architecture: str) -> tuple[bytes, str]:
    """What NVRTC makes of a text of `mlx_source`: code for an architecture such as sm_90, and the kernel's symbol.

    Raises:
        OSError: NVRTC or its headers are not here.
        _Failed: it does not compile.
    """
    library, include = _nvrtc()
    program = ctypes.c_void_p()
    text = (OWN_HEADER + source.removeprefix(_MLX_HEADER)).encode()
    _checked(library, library.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None))
    try:
        name = _qualified(signature).encode()
        _checked(library, library.nvrtcAddNameExpression(program, name))
        # MLX's own architecture flag has the chip's own instructions from 9.0 on.
        own = "a" if int(re.sub(r"\D", "", architecture)) >= 90 else ""
        flags = [f"--gpu-architecture={architecture}{own}", f"--include-path={include}"]
        given = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        if library.nvrtcCompileProgram(program, len(flags), given):
            raise _Failed(_bytes(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace"))
        symbol = ctypes.c_char_p()
        _checked(library, library.nvrtcGetLoweredName(program, name, ctypes.byref(symbol)))
        return _bytes(library, program, "CUBIN"), (symbol.value or b"").decode()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _qualified(signature: Signature) -> str:
    return f"mlx::core::cu::custom_kernel_{signature.name}"


def _architecture() -> str:
    return str(mx.device_info().get("architecture", ""))


def _bytes(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _checked(library, library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
    held = ctypes.create_string_buffer(size.value)
    _checked(library, library[f"nvrtcGet{what}"](program, held))
    return held.raw


def _checked(library: ctypes.CDLL, status: int) -> None:
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise _Failed(library.nvrtcGetErrorString(status).decode())


@cache
def _nvrtc() -> tuple[ctypes.CDLL, Path]:
    """The compiler, the very one that MLX has loaded or else this Python's, and the folder of CUDA's headers."""
    maps = Path("/proc/self/maps")
    mapped = maps.read_text().splitlines() if maps.exists() else []
    loaded = sorted({line.split(maxsplit=5)[5] for line in mapped if "/libnvrtc.so" in line})
    packages = Path(mx.__file__).parents[1]
    installed = sorted(packages.glob("nvidia/*/lib/libnvrtc.so*"), reverse=True)
    for path in [*(Path(each) for each in loaded), *installed]:
        homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
        roots = [path.parents[1], *packages.glob("nvidia/*"), *(Path(home) for home in homes if home)]
        for include in (root / "include" for root in roots):
            if (include / "cuda_bf16.h").exists():
                with contextlib.suppress(OSError):  # another may do
                    return ctypes.CDLL(str(path)), include
    missing = "CUDA's headers: set CUDA_HOME" if loaded or installed else "libnvrtc"
    raise FileNotFoundError(f"there is no {missing}")


def _put(path: Path, content: bytes) -> None:
    """Written whole or not at all, whoever else writes it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


def _is_code(path: Path) -> bool:
    """Whether a file is there and holds code: a machine that broke down may leave it empty."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF"
    except FileNotFoundError:
        return False


def _writable(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK | os.X_OK)


def _standard_hash(data: bytes) -> int:
    """std::hash of a string in GNU's libstdc++ with 64 bits: MurmurHash64A (Appleby), seeded with 0xc70f6907."""
    factor = 0xC6A4A7935BD1E995

    def mixed(word: int) -> int:
        return word ^ (word >> 47)

    found = 0xC70F6907 ^ (len(data) * factor & _MASK)
    for at in range(0, len(data), 8):
        word = int.from_bytes(data[at : at + 8], "little")
        if at + 8 <= len(data):
            word = mixed(word * factor & _MASK) * factor & _MASK
        found = (found ^ word) * factor & _MASK
    return mixed(mixed(found) * factor & _MASK)
