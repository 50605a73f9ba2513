"""Runs a kernel's text on the host: compiled with the system's C++ compiler, threads of a threadgroup as fibers."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.kernels import (
    acceptance,
    attention_inputs,
    draw,
    few_query_attention,
    gated_delta_mixer,
    gated_delta_scan,
    gated_delta_tape,
    kept_logits,
    noise_keys,
    report,
    verify_qmv,
)
from selfdraft.kernels.portable import Call, Kernel, Launch

__all__ = ["kernels_on_host", "needs_compiler", "run_on_host"]

Run = Callable[[Kernel, Sequence[mx.array], Launch], list[mx.array]]

_GUARD = 256  # bytes before and behind every array: NaN in inputs, unchanged in outputs
_TYPES = {
    mx.float32: "float",
    mx.bfloat16: "bfloat16",
    mx.float16: "float16",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
    mx.bool_: "bool",
}
_LIBC = ctypes.CDLL(None)
_KEPT = 7 * 24 * 3600  # seconds that a compiled program stays unused
_FLAGS = ["-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fPIC", "-w"]
_COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")

needs_compiler = pytest.mark.skipif(
    _COMPILER is None and not os.environ.get("TESTS_SKIP_NOTHING"), reason="there is no C++ compiler"
)


def kernels_on_host(patch: pytest.MonkeyPatch, run: Run | None = None) -> None:
    """Have every kernel that is called run on the host, through `run` if it is given."""

    def prepared(kernel: Kernel, launch: Launch, dtypes: Sequence[mx.Dtype]) -> Call:
        def call(inputs: Sequence[mx.array]) -> list[mx.array]:
            assert [x.dtype for x in inputs] == list(dtypes), kernel.name
            return (run or run_on_host)(kernel, inputs, launch)

        return call

    patch.setattr(Kernel, "prepared", prepared)
    for module in (
        acceptance,
        attention_inputs,
        draw,
        few_query_attention,
        gated_delta_mixer,
        gated_delta_scan,
        gated_delta_tape,
        kept_logits,
        noise_keys,
        report,
        verify_qmv,
    ):
        patch.setattr(module, "_CALLS", {})


def run_on_host(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
    """What a kernel computes.

    Its threads take turns forwards, then backwards, and its threadgroups too: both must give the same bits. Nothing may
    be left unwritten (a poison of NaN, or of -1, would show), and nothing outside the arrays may change but the inputs
    that the kernel updates. What no GPU can run ends the process: threads that wait for ever, or for others at another
    place; arrays left by far.
    """
    function = _compiled(_program(kernel, inputs, launch))
    updated = [index for index, name in enumerate(kernel.inputs) if name in kernel.updates]
    forwards, backwards = (_run(function, inputs, launch, updated, backwards=order) for order in (False, True))
    for one, other in zip(forwards, backwards, strict=True):
        assert one.tobytes() == other.tobytes(), f"{kernel.name} depends on the order of its threads"
    count = len(launch.shapes)
    for index, raw in zip(updated, forwards[count:], strict=True):
        array = inputs[index]
        array[...] = _array(raw, array.shape, array.dtype)
    return [
        _array(raw, shape, dtype)
        for raw, shape, dtype in zip(forwards[:count], launch.shapes, launch.dtypes, strict=True)
    ]


def _array(raw: np.ndarray, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    return mx.array(np.frombuffer(raw.tobytes(), np.uint8)).view(dtype).reshape(shape)


def _run(
    function: ctypes._CFuncPtr, inputs: Sequence[mx.array], launch: Launch, updated: Sequence[int], *, backwards: bool
) -> list[np.ndarray]:
    memories = {id(x): _guarded(np.array(x.reshape(-1).view(mx.uint8))) for x in inputs}
    given = [memories[id(x)] for x in inputs]  # an array that is given twice is in memory once
    sizes = [int(np.prod(shape)) * dtype.size for shape, dtype in zip(launch.shapes, launch.dtypes, strict=True)]
    taken = [_guarded(np.full(size, 0xFF, np.uint8)) for size in sizes]
    pointers = (ctypes.c_void_p * len(given + taken))(*(x.ctypes.data + _GUARD for x in (*given, *taken)))
    owned = {id(inputs[index]) for index in updated}
    before = {index: given[index].copy() for index, x in enumerate(inputs) if id(x) not in owned}
    sides = [(ctypes.c_int * max(x.ndim, 1))(*x.shape) for x in inputs]
    shapes = (ctypes.c_void_p * len(sides))(*(ctypes.addressof(each) for each in sides))
    function(pointers, shapes, *launch.threadgroups, launch.threads, backwards)
    assert all(np.array_equal(given[index], was) for index, was in before.items()), "an input was written"
    for x in (*taken, *(given[index] for index in updated)):
        assert (x[:_GUARD] == 0xFF).all(), "written before an output"
        assert (x[-_GUARD:] == 0xFF).all(), "written behind an output"
    changed = [given[index][_GUARD:-_GUARD] for index in updated]
    return [*(x[_GUARD : _GUARD + size] for x, size in zip(taken, sizes, strict=True)), *changed]


def _guarded(content: np.ndarray) -> np.ndarray:
    """A copy between guards, and pages around it that nobody may touch: who goes beyond the guards ends the process."""
    size, page = content.size + 2 * _GUARD, mmap.PAGESIZE
    behind = page + -(-size // page) * page
    memory = mmap.mmap(-1, behind + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for closed in (start, start + behind):
        assert _LIBC.mprotect(ctypes.c_void_p(closed), ctypes.c_size_t(page), 0) == 0
    array = np.frombuffer(memory, np.uint8, size, offset=(behind - size) // 16 * 16)
    array[:] = 0xFF
    array[_GUARD:-_GUARD] = content
    return array


def _program(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> str:
    prelude, body = kernel.text("host", launch.template)
    arguments = [f"auto {n} = static_cast<const {_TYPES[x.dtype]}*>(a[{i}]);" for i, (n, x) in _named(kernel, inputs)]
    for index, (name, dtype) in enumerate(zip(kernel.outputs, launch.dtypes, strict=True), start=len(inputs)):
        arguments.append(f"auto {name} = static_cast<{_TYPES[dtype]}*>(const_cast<void*>(a[{index}]));")
    shapes = [f"const int* {name}_shape = shapes[{i}]; (void){name}_shape;" for i, name in enumerate(kernel.inputs)]
    return "\n".join(
        [
            f"#define HOST_DYNAMIC_BYTES {launch.shared}",
            prelude,
            "static void body(const void* const* a, const int* const* shapes, host::Index group, host::Index grid,",
            "uint worker) {",
            "const uint lane = worker % 32, simdgroup = worker / 32; size_t host_shared = 0;",
            "(void)lane; (void)simdgroup; (void)group; (void)grid; (void)host_shared;",
            *arguments,
            *shapes,
            body,
            "}",
            'extern "C" void run(const void* const* a, const int* const* s, uint x, uint y, uint z, uint threads,',
            "bool backwards) { static host::Threadgroup threadgroup; static host::Index group, grid;",
            "static const void* const* given; static const int* const* shapes; grid = {x, y, z};",
            "host::current = &threadgroup; given = a; shapes = s;",
            "threadgroup.body = [](unsigned worker) { body(given, shapes, group, grid, worker); };",
            "const size_t count = size_t(x) * y * z; for (size_t turn = 0; turn < count; ++turn) {",
            "const size_t at = backwards ? count - 1 - turn : turn;",
            "group.x = at % x; group.y = at / x % y; group.z = at / x / y;",
            "threadgroup.run(threads, backwards); } }",
        ]
    )


def _named(kernel: Kernel, inputs: Sequence[mx.array]) -> list[tuple[int, tuple[str, mx.array]]]:
    return list(enumerate(zip(kernel.inputs, inputs, strict=True)))


@cache
def _folder() -> Path:
    """Of compiled programs, shared by all processes that test this checkout; what a week did not need is gone."""
    folder = Path(__file__).parents[2] / ".pytest_cache" / "host-kernels"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process was first
            if time.time() - path.stat().st_mtime > _KEPT:
                path.unlink()
    return folder


@cache
def _compiler() -> tuple[str, ...]:
    """The compiler and its flags."""
    assert _COMPILER is not None, "the tests of kernels need a C++ compiler"
    return _COMPILER, *_FLAGS


@cache
def _target() -> bytes:
    """All that a program hangs on besides its text: compiler, flags, and the processor it is compiled for."""
    command = [*_compiler(), "-dM", "-E", "-x", "c++", os.devnull]
    return " ".join(command).encode() + subprocess.run(command, capture_output=True, check=True).stdout


@cache
def _precompiled(includes: str) -> Path:
    """A header of these lines, compiled: to read the system's takes half as long as all the rest."""
    header = _folder() / f"{hashlib.sha256(_target() + includes.encode()).hexdigest()[:32]}.h"
    compiled, made = Path(f"{header}.gch"), Path(f"{header}.{os.getpid()}")
    if not compiled.exists():
        made.write_text(includes)
        made.replace(header)
        subprocess.run([*_compiler(), "-x", "c++-header", header, "-o", made], check=True)
        made.replace(compiled)
    for path in (header, compiled):
        os.utime(path)
    return header


@cache
def _compiled(program: str) -> ctypes._CFuncPtr:
    stem = hashlib.sha256(_target() + program.encode()).hexdigest()[:32]
    library = _folder() / f"{stem}.so"
    try:
        os.utime(library)
    except FileNotFoundError:
        _compile(program, library)
    function = ctypes.CDLL(str(library)).run
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_uint] * 4, ctypes.c_bool]
    return function


def _compile(program: str, library: Path) -> None:
    """Write a library, which other processes see whole or not at all."""
    source, made = (library.with_suffix(f".{os.getpid()}.{end}") for end in ("cpp", "so"))
    source.write_text(program)
    header = _precompiled("\n".join(line for line in program.splitlines() if line.startswith("#include <")))
    command = [*_compiler(), "-include", header, "-shared", source, "-o", made]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{source}: {done.stderr[-3000:]}"
    made.replace(library)
    source.unlink()
