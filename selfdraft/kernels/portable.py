"""Kernels whose text runs on Metal, on CUDA, and on the host for tests. Knows the three preludes, and no kernel.

A kernel's text (`source/*.h`) is the body of a function. The prelude before it gives these names everywhere:

    lane, simdgroup, worker    index in the simdgroup of 32, of the simdgroup in its threadgroup, of the thread there
    group                      .x, .y, .z of the threadgroup
    SHARED(T, name, n)         memory of the threadgroup
    BARRIER()                  for all threads of the threadgroup
    simd_total(x), simd_most(x), simd_from(x, lane)    over a simdgroup; every lane must call
    fma, exp, log              of floats
    load4(p, i)                16 bytes at p + 16 i as a uint4 of .x .y .z .w
    WRITABLE(T, p)             the input p of the kernel's `updates`, to be written to
    FUNCTION                   before a function of a part

Inputs are pointers of the arrays' dtypes, with NAME_shape beside them, which costs nothing to read; declare pointers
into them with `auto`, for Metal has address spaces.
Threadgroups are one-dimensional. What stands between prelude and body are `parts`: files `PART.h`, and for one chip's
own instructions `PART_cuda.h` and so on before it, `PART_host.h` among them, which emulates what they call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Literal, cast

import mlx.core as mx

from .cuda_compiler import OWN_HEADER, Signature, compile_ahead, folder

__all__ = ["Backend", "Call", "Kernel", "Launch", "backend", "most_shared", "read_source", "sources_digest"]

Backend = Literal["metal", "cuda", "host"]

Call = Callable[..., list[mx.array]]  # of inputs=[...]

_SOURCE = Path(__file__).parent / "source"
_INCLUDABLE = not set('"\\\n\r') & set(str(_SOURCE))

# What a body begins with. Metal hands out its indices by name, and looks for these names in the body alone.
_OPENING = {
    "metal": """
    const uint lane = thread_index_in_simdgroup;
    const uint simdgroup = simdgroup_index_in_threadgroup;
    const uint worker = thread_index_in_threadgroup;
    const uint3 group = threadgroup_position_in_grid;
    (void)lane; (void)simdgroup; (void)worker; (void)group;
""",
    "cuda": """
    const unsigned lane = threadIdx.x % 32, simdgroup = threadIdx.x / 32, worker = threadIdx.x;
    const uint3 group = {blockIdx.x, blockIdx.y, blockIdx.z};
    (void)lane; (void)simdgroup; (void)worker; (void)group;
""",
    "host": "",
}


_TYPES: Mapping[str, Mapping[mx.Dtype, str]] = {
    "metal": {mx.float32: "float", mx.bfloat16: "bfloat16_t", mx.float16: "half"},
    "cuda": {mx.float32: "float", mx.bfloat16: "__nv_bfloat16", mx.float16: "__half"},
    "host": {mx.float32: "float", mx.bfloat16: "bfloat16", mx.float16: "float16"},
}


@dataclass(frozen=True)
class Launch:
    """How a kernel is called.

    Attributes:
        template: constants of the text by name: numbers, or dtypes. The fewer there are, the less is compiled anew.
        threadgroups: how many, (x, y, z). threads: of each; a multiple of 32.
        shapes, dtypes: of the outputs.
        shared: bytes of DYNAMIC_SHARED memory, for texts that have such.
    """

    template: Mapping[str, int | mx.Dtype]
    threadgroups: tuple[int, int, int]
    threads: int
    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[mx.Dtype]
    shared: int = 0


@dataclass(frozen=True)
class Kernel:
    """A kernel's text and its arguments.

    Attributes:
        name: of the file in `source`.
        inputs, outputs: names of its arrays; inputs must be row-contiguous, and are copied if they are not.
        parts: what it needs behind the prelude.
        updates: inputs that it writes to in place, which MLX does not know of: whoever calls it owns them alone, keeps
            them row-contiguous, and reads them only in operations that take an output of this call as well.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parts: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()

    def prepared(self, launch: Launch, dtypes: Sequence[mx.Dtype]) -> Call:
        """What queues it on the GPU, for inputs of these dtypes; made once and called often, for making it takes time.

        Raises:
            RuntimeError: there is no GPU.
        """
        found = backend()
        if found is None:
            raise RuntimeError(f"kernel {self.name} needs a GPU")
        constants = tuple(launch.template.items())
        make = _compiled(self, constants, tuple(dtypes), tuple(launch.dtypes), launch.shared, found)
        x, y, z = launch.threadgroups
        ready: Call = partial(
            make,
            grid=(x * launch.threads, y, z),
            threadgroup=(launch.threads, 1, 1),
            output_shapes=[list(shape) for shape in launch.shapes],
            output_dtypes=list(launch.dtypes),
        )
        return ready

    def text(self, backend: Backend, template: Mapping[str, int | mx.Dtype]) -> tuple[str, str]:
        """Prelude and body for a back end."""
        parts = [name for part in self.parts for name in (f"{part}_{backend}", part)]
        names = [backend, *(name for name in parts if (_SOURCE / f"{name}.h").exists())]
        constants = [
            f"    constexpr int {name} = {value};"
            if isinstance(value, int)
            else f"    using {name} = {_TYPES[backend][value]};"
            for name, value in template.items()
        ]
        opening = "\n".join([*constants, _OPENING[backend]])
        if backend == "cuda" and _INCLUDABLE:
            # MLX goes through the whole text at every call there, 5 us for 20 KB, so it gets a short one. It looks in
            # that for the shapes to hand over.
            shapes = [f"{name}_shape" for name in self.inputs if f"{name}_shape" in read_source(self.name)]
            body = f"{opening}    // {' '.join(shapes)}\n{_include(self.name)}\n"
            return "\n".join(map(_include, names)) + "\n", body
        return "\n".join(map(read_source, names)), opening + read_source(self.name)


@cache
def _compiled(
    kernel: Kernel,
    template: tuple[tuple[str, int | mx.Dtype], ...],
    inputs: tuple[mx.Dtype, ...],
    outputs: tuple[mx.Dtype, ...],
    shared: int,
    found: Literal["metal", "cuda"],
) -> Call:
    header, body = kernel.text(found, dict(template))
    # CUDA finds compiled kernels by name, whatever their text, what stands before it, and the dtypes of their arrays.
    decisive = [sources_digest(), OWN_HEADER, header, body, *map(str, inputs), *map(str, outputs)]
    name = f"{kernel.name}_{hashlib.sha256(chr(10).join(decisive).encode()).hexdigest()[:16]}"
    if found == "cuda":
        arrays = zip(kernel.inputs, inputs, strict=True), zip(kernel.outputs, outputs, strict=True)
        compile_ahead(Signature(name, *map(tuple, arrays)), header, body)
    named: dict[str, Any] = {
        "name": name,
        "input_names": list(kernel.inputs),
        "output_names": list(kernel.outputs),
        "source": body,
        "header": header,
    }
    made: Any = (
        mx.fast.metal_kernel(**named) if found == "metal" else mx.fast.cuda_kernel(**named, shared_memory=shared)
    )
    return cast("Call", made)


def backend() -> Literal["metal", "cuda"] | None:
    """What the default device takes; None for a CPU."""
    if mx.default_device() != mx.gpu:
        return None
    return "metal" if mx.metal.is_available() else "cuda"


# KB of shared memory for one threadgroup, where there are more than 99 (CUDA C++ Programming Guide, "Compute
# Capabilities").
_SHARED = {"sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227}


@cache
def most_shared() -> int:
    """Bytes of DYNAMIC_SHARED memory that a threadgroup may have on this GPU; on the host as on the largest."""
    if backend() != "cuda":
        return max(_SHARED.values()) * 1024
    return _SHARED.get(str(mx.device_info().get("architecture")), 99) * 1024


@cache
def sources_digest() -> str:
    """Of all texts, as hex: other texts may give other low bits."""
    texts = [path.read_bytes() for path in sorted(_SOURCE.glob("*.h"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def _include(name: str) -> str:
    return f'#include "{_SOURCE / name}.h"'


@lru_cache
def read_source(name: str) -> str:
    """A text of `source`."""
    return (_SOURCE / f"{name}.h").read_text()


if backend() == "cuda":
    folder()  # before MLX compiles anything of its own
