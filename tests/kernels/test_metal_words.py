"""Guards texts for Metal against what its language lacks: no compiler for it runs here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from selfdraft.kernels import portable

# Address spaces and function kinds, and a type: none may name anything.
RESERVED = r"\b(thread|device|constant|threadgroup|kernel|vertex|fragment|half|sampler|visible)\b"
LAMBDA = r"[=(,]\s*\[[&=]?\]\s*\("
SOURCES = sorted(
    path
    for path in Path(portable.__file__).with_name("source").glob("*.h")
    if path.stem not in ("cuda", "host", "metal") and not path.stem.endswith(("_mma", "mma_cuda", "mma_host", "mma"))
)


def portable_code(text: str) -> str:
    """Without comments, and without what stands for Metal alone."""
    text = re.sub(r"//.*", "", text)
    return re.sub(r"#ifdef __METAL_VERSION__.*?#(else|endif)", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_text_names_what_metal_reserves(path: Path) -> None:
    code = portable_code(path.read_text())
    assert not re.findall(RESERVED, code)
    assert not re.findall(LAMBDA, code)


def test_these_are_told() -> None:
    assert re.findall(RESERVED, portable_code("const uint thread = 0;  // thread"))
    assert re.findall(LAMBDA, portable_code("auto f = [&](int i) { return i; };"))
    assert not re.findall(RESERVED, portable_code("#ifdef __METAL_VERSION__\n#define P(x) (device T*)(x)\n#endif\n"))
