"""Guards files that are written a tensor at a time: MLX reads them, and they are there whole or not at all.

A file that lies of itself is refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.errors import CheckpointError
from selfdraft.forge import tensor_file
from selfdraft.forge.tensor_file import TensorWriter, bytes_of, entry_of, stored_bytes
from selfdraft.models.tensor_header import entries
from tests.support.tensor_files import LIES

DTYPES = [
    *(mx.float32, mx.float16, mx.bfloat16, mx.bool_),
    *(mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64),
]


def tensors() -> dict[str, mx.array]:
    found = {str(dtype): mx.random.randint(0, 100, (3, 5)).astype(dtype) for dtype in DTYPES}
    return found | {
        "scalar": mx.array(2.5),
        "empty": mx.zeros((0, 4)),
        "turned": mx.arange(12, dtype=mx.float32).reshape(3, 4).T,
        "part": mx.arange(12, dtype=mx.bfloat16).reshape(3, 4)[:, 1:3],
    }


def write(path: Path, contents: dict[str, mx.array]) -> None:
    listed = [entry_of(name, tensor.dtype, tensor.shape) for name, tensor in contents.items()]
    with TensorWriter(path, listed, {"format": "mlx"}) as file:
        for name, tensor in contents.items():
            file.write(name, [bytes_of(tensor)])


def test_mlx_reads_what_is_written(tmp_path: Path) -> None:
    path, contents = tmp_path / "a.safetensors", tensors()
    write(path, contents)
    found: Any = mx.load(str(path), return_metadata=True)
    assert found[1] == {"format": "mlx"}
    assert found[0].keys() == contents.keys()
    for name, tensor in contents.items():
        assert found[0][name].dtype == tensor.dtype
        assert found[0][name].shape == tensor.shape
        assert mx.array_equal(found[0][name], tensor).item(), name
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_what_mlx_writes_is_read_as_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "_PIECE", 7)
    path, contents = tmp_path / "a.safetensors", tensors()
    mx.save_safetensors(str(path), contents)
    found = entries(path)
    assert {entry.name for entry in found} == contents.keys()
    assert [entry.start for entry in found] == sorted(entry.start for entry in found)
    for entry in found:
        like = entry_of(entry.name, contents[entry.name].dtype, contents[entry.name].shape)
        assert (entry.dtype, entry.shape, entry.nbytes) == (like.dtype, like.shape, like.nbytes)
        pieces = list(stored_bytes(path, entry))
        assert b"".join(pieces) == bytes(bytes_of(contents[entry.name]))
        assert all(len(piece) <= 7 for piece in pieces)


def begun(path: Path, written: list[tuple[str, int]], error: BaseException | None = None) -> None:
    """Write some tensors of a file that is to have two, then end by an error."""
    listed = [entry_of(name, mx.float32, (2,)) for name in "ab"]
    with TensorWriter(path, listed, {}) as file:
        for name, size in written:
            file.write(name, [bytes(size)])
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("full"), CheckpointError("broken")])
def test_a_file_that_was_not_finished_is_not_there(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        begun(tmp_path / "a.safetensors", [("a", 8)], error)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_replaced_is_whole_until_then(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"a": mx.zeros(2)})
    before = path.read_bytes()
    with pytest.raises(OSError, match="full"):
        begun(path, [("a", 8)], OSError("full"))
    assert path.read_bytes() == before


@pytest.mark.parametrize("written", [[("a", 8)], [("a", 7), ("b", 8)], [("b", 8), ("a", 8)]])
def test_a_tensor_too_few_or_of_another_size_is_a_fault(tmp_path: Path, written: list[tuple[str, int]]) -> None:
    with pytest.raises(AssertionError):
        begun(tmp_path / "x", written)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", LIES)
def test_a_file_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(LIES[name])
    with pytest.raises(CheckpointError, match=r"a\.safetensors.*fetch it again"):
        entries(path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"a": mx.zeros(8)})
    (entry,) = entries(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="cut off inside 'a'"):
        list(stored_bytes(path, entry))
