"""Guards that CUDA's compiler takes every text a model needs, and that MLX finds what it made of them."""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.kernels import cuda_compiler as subject
from selfdraft.kernels import portable, verify_qmv_plan
from selfdraft.kernels.cuda_compiler import Signature, compile_ahead, cubin, mlx_source, module_name
from tests.support.cuda_texts import record_texts, run_model, run_others
from tests.support.host_kernels import needs_compiler

TWICE = Signature("twice", (("x", mx.bfloat16), ("count", mx.int32)), (("y", mx.float32),))
HEADER = '#include "prelude.h"\n'
BODY = "    // x_shape\n    y[threadIdx.x] = float(x[threadIdx.x]) * 2 + x_shape[0] + count[0];\n"
PLAIN = "#include <cuda_bf16.h>\n"  # instead of HEADER, to be compiled

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None and not os.environ.get("TESTS_SKIP_NOTHING"),
    reason="there is no NVRTC: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime",
)


def test_the_text_is_the_one_that_mlx_makes() -> None:
    """As custom_kernel.cpp of MLX 0.32 writes it: it finds a compiled kernel by a hash of this."""
    assert mlx_source(TWICE, HEADER, BODY) == (
        '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n#include "prelude.h"\n'
        "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
        "__global__ void custom_kernel_twice(\n"
        "    const __nv_bfloat16* x,\n"
        "    const __grid_constant__ Shape x_shape,\n"
        "    const int32_t* count,\n"
        "    float* y) {\n" + BODY + "\n}\n\n} // namespace mlx::core::cu\n"
    )


@needs_compiler
def test_the_hash_is_the_standard_library_s(tmp_path: Path) -> None:
    texts = [bytes(range(1, n + 1)) for n in range(20)] + [
        b"\xff" * 8,
        b"\x80" * 13,
        mlx_source(TWICE, "", BODY).encode(),
    ]
    program = tmp_path / "hash.cpp"
    program.write_text(
        "#include <cstdio>\n#include <functional>\n#include <string>\n"
        "int main() { for (int n; (n = getchar()) != EOF;) { n += getchar() << 8; std::string s(n, 0);"
        ' fread(&s[0], 1, n, stdin); printf("%zx\\n", std::hash<std::string>{}(s)); } }\n'
    )
    subprocess.run([os.environ.get("CXX") or "c++", "-O1", "-w", "-o", tmp_path / "hash", program], check=True)
    given = b"".join(len(text).to_bytes(2, "little") + text for text in texts)
    found = subprocess.run([tmp_path / "hash"], input=given, capture_output=True, check=True).stdout.decode().split()
    assert [f"{subject._standard_hash(text):x}" for text in texts] == found


@needs_nvrtc
def test_every_text_of_a_model_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the oldest chips that have what the texts use."""
    recorded = record_texts(monkeypatch)
    for tokens in (1, 4):
        run_model(tokens, 4)
    run_others()
    texts = {
        (kernel, *kernel.text("cuda", launch.template, launch.bound), *dtypes): launch
        for kernel, launch, dtypes in recorded
    }
    assert {kernel.name for kernel, *_ in texts} >= {"verify_qmv_mma", "kept_logits", "gated_delta_tape"}
    for (kernel, header, body, *dtypes), launch in texts.items():
        arrays = zip(kernel.inputs, dtypes, strict=True), zip(kernel.outputs, launch.dtypes, strict=True)
        signature = Signature(kernel.name, *map(tuple, arrays))
        code, symbol = cubin(signature, mlx_source(signature, header, body), "sm_80")
        assert code.startswith(b"\x7fELF")
        assert symbol.encode() in code


@needs_nvrtc
@pytest.mark.parametrize(
    ("bits", "dtype", "form"),
    [
        *((bits, dtype, {}) for bits in (4, 8) for dtype in (mx.bfloat16, mx.float16)),
        (4, mx.bfloat16, {"form": "gated", "eps": 1e-6}),
        (4, mx.bfloat16, {"form": "added", "norms": True}),
    ],
)
def test_a_multiprocessor_has_registers_for_a_threadgroup(bits: int, dtype: mx.Dtype, form: dict[str, Any]) -> None:
    """Of the largest products: else they could not be launched. Left alone, the compiler takes 174 a thread for 32 rows
    in fp16, of which 384 threads have 168."""
    for rows in (16, 32):
        matrix = verify_qmv_plan.Matrix(14336, 5120, bits, 64, dtype, **form)
        launch, kernel = verify_qmv_plan.MMA.launch(matrix, rows), verify_qmv_plan.MMA.kernel(matrix)
        others = {"weight": mx.uint32, "squares": mx.float32, "squares_now": mx.float32}
        arrays = ([(name, others.get(name, dtype)) for name in names] for names in (kernel.inputs, kernel.outputs))
        signature = Signature(kernel.name, *map(tuple, arrays))
        header, body = kernel.text("cuda", launch.template, launch.bound)
        code, _ = cubin(signature, mlx_source(signature, header, body), "sm_90")
        registers = of_code(code, REGISTERS)
        assert 24 <= registers <= 255
        assert (registers + 7) // 8 * 8 * launch.threads <= 65536
        assert of_code(code, STACK) <= (
            48 if matrix.norms else 32
        )  # addresses for a few pieces of a matrix, and nothing of what is summed


REGISTERS, STACK = 0x2F, 0x11  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE: attributes of .nv.info


def of_code(code: bytes, attribute: int) -> int:
    """Of a kernel in ELF. An attribute is: form, number, then with form 4 a size in bytes and here (symbol, value)."""
    sections, size, count, names = *struct.unpack_from("<Q", code, 0x28), *struct.unpack_from("<HHH", code, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", code, sections + size * index) for index in range(count)]
    (at, end) = next(
        (head[4], head[4] + head[5]) for head in heads if code[heads[names][4] + head[0] :].startswith(b".nv.info\0")
    )
    while at < end:
        form, number, length = struct.unpack_from("<BBH", code, at)
        if (form, number) == (4, attribute):
            return int(struct.unpack_from("<II", code, at + 4)[1])
        at += 4 + (length if form == 4 else 0)
    raise AssertionError(f"there is no attribute {attribute}")


def test_a_bound_stands_behind_everything_but_the_signature() -> None:
    """And a kernel without one has none: told how many threads there are, the compiler takes fewer registers."""
    kernel, template = (
        verify_qmv_plan.MMA.kernel(verify_qmv_plan.Matrix(64, 256, 4, 64, mx.bfloat16)),
        {"T": mx.bfloat16},
    )
    free, _ = kernel.text("cuda", template)
    bound, _ = kernel.text("cuda", template, 384)
    assert bound.startswith(free)
    assert bound.endswith("\n#define __global__ __attribute__((global)) __launch_bounds__(384)\n")
    assert "launch_bounds" not in free
    assert kernel.text("metal", template, 384) == kernel.text("metal", template)


@needs_nvrtc
def test_mlx_finds_code_and_symbol_where_it_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "jit"))
    monkeypatch.setattr(subject, "_architecture", lambda: "sm_90")
    compile_ahead(TWICE, PLAIN, BODY)
    base = tmp_path / "jit" / module_name(TWICE, mlx_source(TWICE, PLAIN, BODY))
    name, symbol = base.with_suffix(".txt").read_text().rstrip("\n").split("\t")
    assert name == "mlx::core::cu::custom_kernel_twice"
    assert symbol.encode() in base.with_suffix(".ptx").read_bytes()
    assert sorted(path.suffix for path in (tmp_path / "jit").iterdir()) == [".ptx", ".txt"]

    def never(*_: object) -> None:
        raise AssertionError("compiled twice")

    monkeypatch.setattr(subject, "cubin", never)
    compile_ahead(TWICE, PLAIN, BODY)


@needs_nvrtc
def test_what_does_not_compile_is_left_to_mlx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "jit"))
    monkeypatch.setattr(subject, "_architecture", lambda: "sm_90")
    with caplog.at_level("INFO"):
        compile_ahead(TWICE, PLAIN, BODY + "no_such_thing();")
    assert "no_such_thing" in caplog.text
    assert not (tmp_path / "jit").exists()


def test_a_folder_that_cannot_be_written_to_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(subject, "_architecture", lambda: "sm_90")
    monkeypatch.setattr(subject, "cubin", lambda *_: (b"code", "symbol"))
    with caplog.at_level("INFO"):
        compile_ahead(TWICE, PLAIN, BODY)
    assert "left to MLX" in caplog.text


def test_the_folder_is_the_user_s_own_unless_another_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_architecture", lambda: "sm_123")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/somewhere")
    assert subject.folder() == Path("/somewhere")
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    own = subject.folder()
    assert own.name.startswith("mlx-")
    assert own.name.endswith("-sm_123")
    assert os.environ["MLX_PTX_CACHE_DIR"] == str(own)  # MLX reads this
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "")  # so that it is put back


@pytest.mark.parametrize(("architecture", "expected"), [("sm_90", 227), ("sm_80", 163), ("sm_89", 99), ("sm_999", 99)])
def test_shared_memory_is_what_the_chip_has(monkeypatch: pytest.MonkeyPatch, architecture: str, expected: int) -> None:
    monkeypatch.setattr(portable, "backend", lambda: "cuda")
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": architecture})
    portable.most_shared.cache_clear()
    assert portable.most_shared() == expected * 1024
    portable.most_shared.cache_clear()


def test_a_home_that_is_not_the_user_s_leaves_mlx_its_own_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """MLX throws at every kernel of its own where it may not enter the folder."""
    monkeypatch.setattr(subject, "_architecture", lambda: "sm_90")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "x")
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    monkeypatch.setattr(subject.tempfile, "gettempdir", lambda: str(tmp_path))

    def closed(*_: object, **__: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "mkdir", closed)
    assert subject.folder() == tmp_path / "mlx" / subject.version("mlx") / "ptx"
    assert "MLX_PTX_CACHE_DIR" not in os.environ
    monkeypatch.setattr(subject, "cubin", lambda *_: (b"\x7fELF", "symbol"))
    compile_ahead(TWICE, PLAIN, BODY)  # which cannot be written, and is no failure


def test_an_empty_variable_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "")
    compile_ahead(TWICE, PLAIN, BODY)
    assert not list(tmp_path.iterdir())


def test_what_a_breakdown_left_empty_is_written_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(subject, "_architecture", lambda: "sm_90")
    monkeypatch.setattr(subject, "cubin", lambda *_: (b"\x7fELF code", "symbol"))
    compile_ahead(TWICE, PLAIN, BODY)
    (code,) = tmp_path.glob("*.ptx")
    code.write_bytes(b"")
    compile_ahead(TWICE, PLAIN, BODY)
    assert code.read_bytes() == b"\x7fELF code"


@pytest.mark.parametrize("failure", [OSError("full"), AttributeError("no such function"), ValueError("no digits")])
def test_no_failure_takes_a_kernel_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: Exception) -> None:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(subject, "_architecture", lambda: "sm_90")

    def fails(*_: object) -> None:
        raise failure

    monkeypatch.setattr(subject, "cubin", fails)
    compile_ahead(TWICE, PLAIN, BODY)
    monkeypatch.setattr(subject, "cubin", lambda *_: (b"\x7fELF", "symbol"))
    monkeypatch.setattr(subject.os, "replace", fails)
    if isinstance(failure, OSError):
        compile_ahead(TWICE, PLAIN, BODY)
        assert not list(tmp_path.iterdir())  # no half of anything
