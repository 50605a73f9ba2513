"""Guards the host that tests run kernels on: it must show the faults that a GPU would show only now and then.

A host that takes a faulty text makes every test of a kernel worthless.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.kernels import portable
from selfdraft.kernels.portable import Kernel, Launch
from tests.support.host_kernels import needs_compiler, run_on_host

pytestmark = needs_compiler

ROOT = Path(__file__).parents[2]
Run = Callable[..., mx.array]
POISON = 2**32 - 1  # what is in memory that nobody wrote, or that lies outside; NaN as a float


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a body of one input x and one output y in threadgroups of 64."""
    read = portable.read_source

    def run(
        body: str,
        x: mx.array,
        size: int = 64,
        dtype: mx.Dtype = mx.float32,
        threadgroups: tuple[int, int, int] = (1, 1, 1),
        template: dict[str, int | mx.Dtype] | None = None,
    ) -> mx.array:
        monkeypatch.setattr(portable, "read_source", lambda name: body if name == "fake" else read(name))
        launch = Launch(template or {}, threadgroups, 64, [(size,)], [dtype])
        return run_on_host(Kernel("fake", ("x",), ("y",)), [x], launch)[0]

    return run


def counting(size: int = 64) -> mx.array:
    return mx.arange(size, dtype=mx.float32)


READ_THE_OTHER_END = """
SHARED(float, kept, 64);
kept[worker] = x[worker];
{first}
const float other = kept[63 - worker];
{second}
kept[worker] = -1;
y[worker] = other;
"""


def test_barriers_in_place_give_the_result(run: Run) -> None:
    found = run(READ_THE_OTHER_END.format(first="BARRIER();", second="BARRIER();"), counting())
    assert found.tolist() == list(range(63, -1, -1))


@pytest.mark.parametrize(
    ("first", "second"), [("", "BARRIER();"), ("BARRIER();", "")], ids=["read early", "overwritten early"]
)
def test_a_missing_barrier_is_found(run: Run, first: str, second: str) -> None:
    with pytest.raises(AssertionError, match="order of its threads"):
        run(READ_THE_OTHER_END.format(first=first, second=second), counting())


def test_a_missing_barrier_between_simdgroups_is_found(run: Run) -> None:
    """An exchange in a simdgroup is no barrier for the threadgroup: the usual fault in a sum of sums."""
    body = """
        SHARED(float, sums, 2);
        const float sum = simd_total(x[worker]);
        if (lane == 0) sums[simdgroup] = sum;
        {barrier}
        y[worker] = sums[0] + sums[1];
    """
    assert run(body.format(barrier="BARRIER();"), counting()).tolist() == [2016.0] * 64
    with pytest.raises(AssertionError, match="order of its threads"):
        run(body.format(barrier=""), counting())


def test_threadgroups_that_write_the_same_element_are_found(run: Run) -> None:
    """On a GPU nobody knows which comes last."""
    body = "const uint second = group.x + group.y + group.z, at = second * {step} + worker; y[at] = x[at] + second;"
    for threadgroups in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        apart = run(body.format(step=64), counting(128), size=128, threadgroups=threadgroups)
        assert apart.tolist() == [i + i // 64 for i in range(128)]
        with pytest.raises(AssertionError, match="order of its threads"):
            run(body.format(step=60), counting(128), size=124, threadgroups=threadgroups)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.int32], ids=str)
def test_an_element_left_unwritten_is_poison(run: Run, dtype: mx.Dtype) -> None:
    found = run("if (worker != 7) y[worker] = x[worker];", counting(), dtype=dtype)
    poison = found == -1 if dtype == mx.int32 else mx.isnan(found)
    assert [i for i in range(64) if poison[i].item()] == [7]


def test_threadgroup_memory_begins_as_poison(run: Run) -> None:
    """In every threadgroup, also after another that wrote there."""
    body = """
        SHARED(float, kept, 64);
        BARRIER();
        y[64 * group.x + worker] = kept[worker];
        BARRIER();
        kept[worker] = x[worker];
    """
    assert mx.isnan(run(body, counting(), size=128, threadgroups=(2, 1, 1))).all().item()


def test_a_write_where_none_belongs_is_found(run: Run) -> None:
    body = """
        y[worker] = 0;
        if (worker == 0 && x[0] == 1) y[64] = 0;
        if (worker == 0 && x[0] == 2) y[-1] = 0;
        if (x[0] == 3) const_cast<float*>(x)[worker] = 1;
    """
    assert (run(body, mx.zeros(64)) == 0).all().item()
    for which, message in enumerate(["behind an output", "before an output", "input was written"], start=1):
        with pytest.raises(AssertionError, match=message):
            run(body, mx.full((64,), which, mx.float32))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.uint32], ids=str)
def test_a_read_outside_an_input_shows(run: Run, dtype: mx.Dtype) -> None:
    body = "y[worker] = x[int(worker) - 1]; y[64 + worker] = x[worker + 1];"
    found = run(body, counting().astype(dtype), size=128, dtype=dtype)
    poison = found == POISON if dtype == mx.uint32 else mx.isnan(found)
    assert [i for i in range(128) if poison[i].item()] == [0, 127]
    assert found[1:127].tolist() == [*range(63), *range(1, 64)]


def test_a_load_of_sixteen_bytes(run: Run) -> None:
    """One that goes over the end shows, too."""
    body = "const uint4 four = load4(x, worker); y[worker] = four.x * 1000000 + four.y * 10000 + four.z * 100 + four.w;"
    numbers = mx.arange(256, dtype=mx.uint32) % 97
    expected = np.array(numbers).reshape(64, 4) @ [1000000, 10000, 100, 1]
    assert run(body, numbers, dtype=mx.uint32).tolist() == expected.tolist()
    short = np.where(np.arange(256) < 254, np.array(numbers), POISON).reshape(64, 4) @ [1000000, 10000, 100, 1]
    assert run(body, numbers[:254], dtype=mx.uint32).tolist() == (short % 2**32).tolist()


def test_indices(run: Run) -> None:
    """Every thread of every threadgroup runs once."""
    body = """
        const uint at = ((group.z * 2 + group.y) * 3 + group.x) * 64 + worker;
        y[at] = x[0] + (worker == 32 * simdgroup + lane ? at : -1);
    """
    found = run(body, mx.zeros(64), size=64 * 12, threadgroups=(3, 2, 2))
    assert found.tolist() == list(range(64 * 12))


def test_what_a_simdgroup_exchanges(run: Run) -> None:
    """Each simdgroup of 32 by itself, each lane its own; one after the other, so that a slot is used again. A total is
    summed as CUDA sums it, lane and lane + 16 first, and all lanes get the same bits."""
    random = np.random.default_rng(0)
    numbers = (random.normal(size=64) * 10.0 ** (np.arange(64) % 9 - 4)).astype(np.float32)
    body = """
        const float total = simd_total(x[worker]), most = simd_most(x[worker]);
        const float next = simd_from(x[worker], (lane + 1) % 32), fifth = simd_from(x[worker], 5);
        const float twice = simd_from(simd_from(x[worker], lane ^ 3), lane ^ 3);
        y[worker] = total; y[64 + worker] = most; y[128 + worker] = next;
        y[192 + worker] = fifth; y[256 + worker] = twice;
    """
    found = np.array(run(body, mx.array(numbers), size=320)).reshape(5, 2, 32)
    for simd, values in enumerate(numbers.reshape(2, 32)):
        total = values
        while len(total) > 1:
            total = total[: len(total) // 2] + total[len(total) // 2 :]
        np.testing.assert_array_equal(found[0, simd], np.full(32, total[0]))
        np.testing.assert_array_equal(found[1, simd], np.full(32, values.max()))
        np.testing.assert_array_equal(found[2, simd], np.roll(values, -1))
        np.testing.assert_array_equal(found[3, simd], np.full(32, values[5]))
        np.testing.assert_array_equal(found[4, simd], values)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_rounding_and_reading_equal_mlx(run: Run, dtype: mx.Dtype) -> None:
    """Random bits (subnormals, infinity and NaN among them), borders between two values and their neighbours; and each
    of the 65,536 values of the dtype, which must come back."""
    shift = 16 if dtype == mx.bfloat16 else 13
    borders = np.arange(0, 2**32, 2**shift, dtype=np.uint64) + 2 ** (shift - 1)
    some = np.random.default_rng(2).permutation(borders)[:20_000]
    random = np.random.default_rng(3).integers(0, 2**32, 20_000, dtype=np.uint64)
    special = [0x0, 0x8000_0000, 0x7F80_0000, 0xFF80_0000, 0x7F7F_FFFF, 0x7FC0_0000, 0x7F80_0001, 0xFFFF_FFFF, 1]
    words = np.concatenate([some - 1, some, some + 1, random, np.array(special, np.uint64)]).astype(np.uint32)
    all_values = mx.arange(2**16, dtype=mx.uint32).astype(mx.uint16).view(dtype).astype(mx.float32)
    numbers = mx.concatenate([all_values, mx.array(words).view(mx.float32)])
    numbers = mx.pad(numbers, (0, -numbers.size % 64))
    size = numbers.size
    body = "const uint at = 64 * group.x + worker; y[at] = float(T(x[at]));"
    found = run(body, numbers, size=size, threadgroups=(size // 64, 1, 1), template={"T": dtype})
    expected = np.array(numbers.astype(dtype).astype(mx.float32))
    assert np.isnan(expected).sum() > 50
    np.testing.assert_array_equal(np.array(found), expected)  # a NaN equals a NaN here
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(np.array(found))[number], np.signbit(expected)[number])


def test_products_and_sums_are_not_joined(run: Run) -> None:
    """a * b + c is rounded twice, and fma(a, b, c) once, as the texts say."""
    numbers = mx.array([1 + 2.0**-12, -1 - 2.0**-11])
    found = run("y[worker] = worker ? fma(x[0], x[0], x[1]) : x[0] * x[0] + x[1];", numbers)
    assert found.tolist() == [0.0] + [2.0**-24] * 63


ALONE = """
import faulthandler, os, sys
import mlx.core as mx
from selfdraft.kernels import portable
from selfdraft.kernels.portable import Kernel, Launch
from tests.support.host_kernels import run_on_host

read = portable.read_source
for number, body in enumerate(sys.argv[1:]):
    with open(f"{number}.out", "wb") as output:
        if os.fork():
            print(os.wait()[1], flush=True)
            continue
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable()
    portable.read_source = lambda name: body if name == "fake" else read(name)
    run_on_host(Kernel("fake", ("x",), ("y",)), [mx.zeros(64)], Launch({}, (1, 1, 1), 64, [(64,)], [mx.float32]))
    print("it ended", flush=True)
    os._exit(0)
"""

IMPOSSIBLE = {
    "barrier": ("if (worker < 40) { BARRIER(); } y[worker] = 0;", "40 threads wait"),
    "lane": ("y[worker] = lane < 31 ? simd_total(x[worker]) : 0;", "62 threads wait"),
    "two exchanges": (
        "if (lane < 16) { y[worker] = simd_total(1); }\nelse { y[worker] = simd_total(2); }",
        "different places",
    ),
    "two barriers": (
        "if (worker < 32) { BARRIER(); y[worker] = 0; }\nelse { BARRIER(); y[worker] = 1; }",
        "different places",
    ),
    "memory": ("SHARED(float, kept, 16000); kept[worker] = 0; y[worker] = 0;", "too many"),
    "lane 32": ("y[worker] = simd_from(x[worker], lane + 1);", "no lane 32"),
    "far read": ("const float far = x[64 + 64 + worker]; y[worker] = far == 1 ? 1 : 0;", "Fatal Python error"),
}


def test_what_no_gpu_can_run_ends_the_process(tmp_path: Path) -> None:
    """Threads that wait for ever, or meet at different places; what is beyond a chip's bounds; and reads beyond the
    guards, which need not show in a result. Each in a fork of a process that imported MLX and never used it."""
    fine = "y[worker] = x[worker];"
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *(body for body, _ in IMPOSSIBLE.values()), fine],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    ends = [int(line) for line in done.stdout.split()]
    said = [(tmp_path / f"{number}.out").read_text() for number in range(len(ends))]
    assert (ends.pop(), said.pop()) == (0, "it ended\n")
    for (what, (_, message)), status, text in zip(IMPOSSIBLE.items(), ends, said, strict=True):
        assert os.WIFSIGNALED(status), (what, text)
        assert message in text, what
        assert "it ended" not in text, what


def test_a_text_that_does_not_compile_is_shown(run: Run) -> None:
    with pytest.raises(AssertionError, match="unknown_name"):
        run("y[worker] = unknown_name;", counting())


def test_the_same_text_with_other_constants_is_another_program(run: Run) -> None:
    body = "y[worker] = x[worker] * SCALE + sizeof(T);"
    assert run(body, mx.ones(64), template={"SCALE": 2, "T": mx.float16}).tolist() == [4.0] * 64
    assert run(body, mx.ones(64), template={"SCALE": 3, "T": mx.float32}).tolist() == [7.0] * 64
