"""Kernels whose text runs on Metal, on CUDA, and on the host for tests. Knows the three preludes, and no kernel.

A kernel's text (`source/*.h`) is the body of a function. The prelude before it gives these names everywhere:

    lane, simdgroup, worker    index in the simdgroup of 32, of the simdgroup in its threadgroup, of the thread there
    group, grid                .x, .y, .z of the threadgroup; how many there are
    SHARED(T, name, n)         memory of the threadgroup
    BARRIER()                  for all threads of the threadgroup
    simd_total(x), simd_most(x), simd_from(x, lane)    over a simdgroup; every lane must call
    fma, exp, log              of floats
    load4(p, i)                16 bytes at p + 16 i as a uint4 of .x .y .z .w
    WRITABLE(T, p)             the input p of the kernel's `updates`, to be written to
    FUNCTION                   before a function of a part

Inputs are pointers of the arrays' dtypes, with NAME_shape beside them, which costs nothing to read; declare pointers
into them with `auto`, for Metal has address spaces. An array of the kernel's `many` is that of row group.z.
Threadgroups are one-dimensional. What stands between prelude and body are `parts`: files `PART.h`, and for one chip's
own instructions `PART_cuda.h` and so on before it, `PART_host.h` among them, which emulates what they call.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import mlx.core as mx

from .cuda_compiler import OWN_HEADER, Signature, compile_ahead, folder

__all__ = [
    "Backend",
    "Call",
    "Kernel",
    "Launch",
    "backend",
    "most_rows",
    "most_shared",
    "one_a_row",
    "read_source",
    "remember",
    "row_chunks",
    "sources_digest",
]

_Made = TypeVar("_Made")
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
    const uint3 group = threadgroup_position_in_grid, grid = threadgroups_per_grid;
    (void)lane; (void)simdgroup; (void)worker; (void)group; (void)grid;
""",
    "cuda": """
    const unsigned lane = threadIdx.x % 32, simdgroup = threadIdx.x / 32, worker = threadIdx.x;
    const uint3 group = {blockIdx.x, blockIdx.y, blockIdx.z}, grid = {gridDim.x, gridDim.y, gridDim.z};
    (void)lane; (void)simdgroup; (void)worker; (void)group; (void)grid;
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
        template: constants of the text by name: numbers (int, float) or dtypes. The fewer, the less is compiled anew.
        threadgroups: how many, (x, y, z). threads: of each; a multiple of 32.
        shapes, dtypes: of the outputs.
        shared: bytes of DYNAMIC_SHARED memory, for texts that have such.
        bounded: on CUDA the compiler is told `threads`, and makes do with the registers that so many have. Not where it
            does so anyhow: told, it takes fewer.
    """

    template: Mapping[str, int | float | mx.Dtype]
    threadgroups: tuple[int, int, int]
    threads: int
    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[mx.Dtype]
    shared: int = 0
    bounded: bool = False

    @property
    def bound(self) -> int:
        """Threads that the compiler is told; 0 if none."""
        return self.threads if self.bounded else 0


@dataclass(frozen=True)
class Kernel:
    """A kernel's text and its arguments.

    Attributes:
        name: of the file in `source`.
        inputs, outputs: names of its arrays; inputs must be row-contiguous, and are copied if they are not.
        parts: what it needs behind the prelude.
        updates: inputs that it writes to in place, which MLX does not know of: whoever calls it owns them alone, keeps
            them row-contiguous, and reads them only in operations that take an output of this call as well.
        many: inputs or outputs of which every row has an array of its own, of a shape of its own; a row is a group.z.
            See `for_rows` and `one_a_row`.
        rows: of which there are arrays.
        absent: arrays that the text names, but only where a constant of the template forbids it to look at them.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parts: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    many: tuple[str, ...] = ()
    rows: int = 0
    absent: tuple[str, ...] = ()

    def for_rows(self, rows: int) -> Kernel:
        """The same with an array for each of so many rows, NAME_0, NAME_1 and so on, in the place of each of `many`."""

        def of(names: tuple[str, ...]) -> tuple[str, ...]:
            own = [[f"{name}_{row}" for row in range(rows)] if name in self.many else [name] for name in names]
            return tuple(each for part in own for each in part)

        return replace(self, inputs=of(self.inputs), outputs=of(self.outputs), updates=of(self.updates), rows=rows)

    def prepared(self, launch: Launch, dtypes: Sequence[mx.Dtype]) -> Call:
        """What queues it on the GPU, for inputs of these dtypes; made once and called often, for making it takes time.

        Raises:
            RuntimeError: there is no GPU.
        """
        found = backend()
        if found is None:
            raise RuntimeError(f"kernel {self.name} needs a GPU")
        constants = tuple(launch.template.items())
        make = _compiled(self, constants, tuple(dtypes), tuple(launch.dtypes), launch.shared, launch.bound, found)
        x, y, z = launch.threadgroups
        ready: Call = partial(
            make,
            grid=(x * launch.threads, y, z),
            threadgroup=(launch.threads, 1, 1),
            output_shapes=[list(shape) for shape in launch.shapes],
            output_dtypes=list(launch.dtypes),
        )
        return ready

    def text(self, backend: Backend, template: Mapping[str, int | float | mx.Dtype], bound: int = 0) -> tuple[str, str]:
        """Prelude and body for a back end. `bound`: of a launch."""
        parts = [name for part in self.parts for name in (f"{part}_{backend}", part)]
        names = [backend, *(name for name in parts if (_SOURCE / f"{name}.h").exists())]
        constants = [_constant(name, value, backend) for name, value in template.items()]
        opening = "\n".join([*constants, *self._missing(backend), _OPENING[backend], *self._own_arrays()])
        if backend == "cuda" and _INCLUDABLE:
            # MLX goes through the whole text at every call there, 5 us for 20 KB, so it gets a short one. It looks in
            # that for the shapes to hand over.
            shapes = [f"{name}_shape" for name in self.inputs if f"{name}_shape" in read_source(self.name)]
            body = f"{opening}    // {' '.join(shapes)}\n{_include(self.name)}\n"
            return "\n".join(map(_include, names)) + "\n" + _bounds(bound), body
        bounds = _bounds(bound) if backend == "cuda" else ""
        return "\n".join(map(read_source, names)) + bounds, opening + read_source(self.name)

    def _missing(self, backend: Backend) -> list[str]:
        """What stands for arrays that are absent."""
        source, space = read_source(self.name), "device " if backend == "metal" else ""
        lines = [f"    {space}float* const {name} = nullptr;" for name in self.absent]
        return lines + [f"    const int {x}_shape[4] = {{0}};" for x in self.absent if f"{x}_shape" in source]

    def _own_arrays(self) -> list[str]:
        """What makes NAME and NAME_shape those of a threadgroup's row. An array of pointers, indexed by the row, would
        lie in memory; one conditional of all rows becomes jumps, one after the other become selects."""
        lines = []
        for name in self.many:
            axes = {int(axis) for axis in re.findall(rf"\b{name}_shape\[(\d)\]", read_source(self.name))}
            sides = ", ".join(f"{name}_0_shape[{axis}]" for axis in range(max(axes, default=-1) + 1))
            lines += [f"auto {name} = {name}_0;", *([f"int {name}_shape[] = {{{sides}}};"] if axes else [])]
            for row in range(1, self.rows):
                lines.append(f"{name} = group.z == {row} ? {name}_{row} : {name};")
                for axis in sorted(axes):
                    side = f"{name}_shape[{axis}]"
                    lines.append(f"{side} = group.z == {row} ? {name}_{row}_shape[{axis}] : {side};")
        return [*(f"    {line}" for line in lines), ""] if lines else []


def _bounds(threads: int) -> str:
    """Gives MLX's signature of a kernel, which is all that stands behind a prelude but its body, a bound of threads."""
    if not threads:
        return ""
    return f"\n#undef __global__\n#define __global__ __attribute__((global)) __launch_bounds__({threads})\n"


def _constant(name: str, value: int | float | mx.Dtype, backend: Backend) -> str:
    """A line that defines it."""
    if isinstance(value, mx.Dtype):
        return f"    using {name} = {_TYPES[backend][value]};"
    kind, written = ("int", value) if isinstance(value, int) else ("float", f"{value!r}f")
    return f"    constexpr {kind} {name} = {written};"


@cache
def _compiled(
    kernel: Kernel,
    template: tuple[tuple[str, int | float | mx.Dtype], ...],
    inputs: tuple[mx.Dtype, ...],
    outputs: tuple[mx.Dtype, ...],
    shared: int,
    bound: int,
    found: Literal["metal", "cuda"],
) -> Call:
    header, body = kernel.text(found, dict(template), bound)
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


def most_rows() -> int:
    """Rows of which one launch takes the arrays. Metal has 31 buffers for all of a kernel's arrays and their shapes."""
    return 4 if backend() == "metal" else 8


def row_chunks(rows: int, most: int | None = None) -> list[slice]:
    """Rows for one launch each, at most `most`: as few launches as can be, as even as can be."""
    count = -(-rows // min(most or rows, most_rows()))
    borders = [rows * chunk // count for chunk in range(count + 1)]
    return [slice(*pair) for pair in pairwise(borders)]


def one_a_row(arrays: Sequence[mx.array]) -> list[mx.array]:
    """A chunk's arrays for one of a kernel's `many`, for one row or for `most_rows`; the last stands in for those that
    no threadgroup asks for.

    So there are two texts, both of which a self-check can run, rather than one for every number of rows.
    """
    return list(arrays) if len(arrays) == 1 else [*arrays, *[arrays[-1]] * (most_rows() - len(arrays))]


_REMEMBERED = 1024


def remember(calls: dict[tuple[object, ...], _Made], key: tuple[object, ...], made: _Made) -> _Made:
    """Keep what was made for a key, for calls whose keys have sizes of many rows: so many that old ones must go."""
    if len(calls) >= _REMEMBERED:
        calls.clear()
    calls[key] = made
    return made


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
