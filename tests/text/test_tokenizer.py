"""Guards: ids are the library's own, user text cannot inject control tokens, bad files have clear errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, processors

from selfdraft.errors import CheckpointError, InvalidRequest
from selfdraft.text import Tokenizer

MARKERS = [
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_response>",
]


@pytest.fixture
def folder(reference: Path, tmp_path: Path) -> Path:
    """A copy of the tokenizer files that a test may spoil."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(reference / name, tmp_path / name)
        (tmp_path / name).chmod(0o644)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    value = json.loads(path.read_text(encoding="utf-8"))
    value.update(changes)
    value = {key: entry for key, entry in value.items() if entry is not None}
    path.write_text(json.dumps(value), encoding="utf-8")


def test_reference(tokenizer: Tokenizer, reference: Path) -> None:
    assert tokenizer.vocab_size == 8192
    assert tokenizer.eos_ids == {8174, 8172}
    assert tokenizer.bos_id is None
    assert tokenizer.special_ids == set(range(8172, 8186))
    library = tokenizers.Tokenizer.from_file(str(reference / "tokenizer.json"))
    text = "<|im_start|>user\nनमस्ते 🙂<|im_end|>\n"
    assert tokenizer.encode(text, special=True) == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.token_id("<think>") == 8190
    assert tokenizer.token_id("<no such token>") is None


@pytest.mark.parametrize("marker", MARKERS)
def test_markers_in_text(tokenizer: Tokenizer, marker: str) -> None:
    text = f"before {marker} after"
    id = tokenizer.token_id(marker)
    assert id in tokenizer.encode(text, special=True)
    spelled = tokenizer.encode(text, special=False)
    assert max(spelled) < 8172  # no added token at all
    assert tokenizer.decode(spelled) == text


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.one_of(st.sampled_from([*MARKERS, "<|", "|>", "<", "im_end"]), st.text(max_size=6)), max_size=8)
)
def test_user_text_never_gives_an_added_token(tokenizer: Tokenizer, parts: list[str]) -> None:
    ids = tokenizer.encode("".join(parts), special=False)
    assert all(id < 8172 for id in ids)


def test_special_false_leaves_special_true_alone(tokenizer: Tokenizer) -> None:
    tokenizer.encode("<|im_end|>", special=False)
    assert tokenizer.encode("<|im_end|>", special=True) == [8174]


def test_added_white_space_is_text(tokenizer: Tokenizer) -> None:
    """GPT-NeoX's runs of spaces are unflagged added tokens: ordinary text must keep using them."""
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "<": 1, ">": 2, "Ġ": 3}, []))
    library.add_tokens(["    ", "<a>"])
    toy = Tokenizer(library)
    assert toy.encode("a    a<a>", special=True) == [0, 4, 0, 5]
    assert toy.encode("a    a<a>", special=False) == [0, 4, 0, 1, 0, 2]


def test_control_token_in_a_unigram_vocabulary_is_refused() -> None:
    """A Unigram model can pick a control token as an ordinary piece; there is no spelling around that."""
    library = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0)], 0, False))
    library.add_special_tokens(["</s>"])
    with pytest.raises(InvalidRequest, match="control token '</s>'"):
        Tokenizer(library).encode("a</s>", special=False)


def test_nothing_is_added_at_either_end(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("", special=True) == tokenizer.encode("", special=False) == []


@pytest.mark.parametrize("special", [True, False])
def test_lone_surrogate(tokenizer: Tokenizer, special: bool) -> None:
    with pytest.raises(InvalidRequest, match=r"lone surrogate '\\ud83d' at character 2"):
        tokenizer.encode("ab\ud83d", special=special)


def test_decode_skips_special(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hi<think><|im_end|>", special=True)
    assert tokenizer.decode(ids) == "hi<think>"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hi<think><|im_end|>"
    assert tokenizer.decode([*ids, 99_999]) == "hi<think>"  # a padded row of the output projection


def test_token_text(tokenizer: Tokenizer, fallback: Tokenizer) -> None:
    assert [tokenizer.token_text(id) for id in tokenizer.encode("to be", special=False)] == ["to", " be"]
    assert tokenizer.token_text(8174) == "<|im_end|>"
    assert tokenizer.token_text(99_999) == ""
    assert tokenizer.token_text(tokenizer.encode("🙂", special=False)[0]) == "\ufffd"
    the = fallback.token_id("▁the")
    assert the is not None
    assert fallback.decode([the]) == "the"
    assert fallback.token_text(the) == " the"


def test_a_token_that_is_part_of_a_character_has_its_own_bytes(tokenizer: Tokenizer, fallback: Tokenizer) -> None:
    """Logprobs tell them: joined, the bytes of an answer's tokens are its text, and no two parts look the same."""
    ids = tokenizer.encode("ab🙂\ufffd<think>", special=True)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "ab🙂\ufffd<think>"
    parts = [tokenizer.token_name(id) for id in ids if "\ufffd" in tokenizer.token_text(id)]
    assert "".join(part.removeprefix("bytes:") for part in parts) == r"\xf0\x9f\x99\x82\xef\xbf\xbd"
    assert len(parts) > 2
    assert (tokenizer.token_name(99_999), tokenizer.token_bytes(99_999)) == ("", b"")
    assert (fallback.token_name(0xE2), fallback.token_bytes(0xE2)) == (r"bytes:\xe2", b"\xe2")
    assert (fallback.token_name(0x41), fallback.token_bytes(0x41)) == ("A", b"A")  # a whole character
    whole = fallback.token_id("\ufffd")
    assert whole is not None
    assert (fallback.token_name(whole), fallback.token_bytes(whole)) == ("\ufffd", b"\xef\xbf\xbd")


def test_shipped_truncation_and_padding_are_off(folder: Path) -> None:
    edit(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        },
    )
    text = "one two three four five six"
    tokenizer = Tokenizer.from_folder(folder)
    for special in (True, False):
        ids = tokenizer.encode(text, special=special)
        assert len(ids) > 4
        assert tokenizer.decode(ids) == text


def test_eos_sources_in_order(folder: Path) -> None:
    def found() -> frozenset[int]:
        return Tokenizer.from_folder(folder).eos_ids

    edit(folder / "tokenizer_config.json", eos_token={"content": "<|im_start|>"})
    edit(folder / "config.json", eos_token_id=5, text_config={"eos_token_id": [6, 7]})
    edit(folder / "generation_config.json", eos_token_id=4)
    assert found() == {4}
    edit(folder / "generation_config.json", eos_token_id=None)
    assert found() == {5}
    (folder / "generation_config.json").unlink()
    assert found() == {5}
    edit(folder / "config.json", eos_token_id=None)
    assert found() == {6, 7}
    (folder / "config.json").unlink()
    assert found() == {8173}
    edit(folder / "tokenizer_config.json", eos_token="<|im_end|>")
    assert found() == {8174}
    (folder / "tokenizer_config.json").unlink()
    assert found() == frozenset()


def test_bos(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    edit(config, bos_token="<|im_start|>", add_bos_token=True)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_id == 8173
    assert 8173 not in tokenizer.encode("hi", special=True)  # never added by encode
    edit(config, add_bos_token=False)
    assert Tokenizer.from_folder(folder).bos_id is None


def test_bos_by_the_post_processor(folder: Path) -> None:
    """Llama 3 says nothing in its config; its post-processor puts BOS first."""
    config = folder / "tokenizer_config.json"
    edit(config, bos_token="<|im_start|>", add_bos_token=None)
    assert Tokenizer.from_folder(folder).bos_id is None
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 8173)])
    library.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_id == 8173
    assert 8173 not in tokenizer.encode("hi", special=True)


def test_missing_tokenizer_names_folder_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json in .*Download the checkpoint again") as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 3}'])
def test_unusable_tokenizer(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a usable tokenizer"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize(("content", "says"), [(b"{", "not valid JSON"), (b"[1]", "object"), (b"\xff\xfe", "read")])
def test_malformed_config(folder: Path, name: str, content: bytes, says: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        Tokenizer.from_folder(folder)
    assert str(folder / name) in str(caught.value)


@pytest.mark.parametrize("value", ["<|im_end|>", [1, "2"], True, -1, 1.5])
def test_bad_eos_id(folder: Path, value: object) -> None:
    edit(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(CheckpointError, match=r"eos_token_id in generation_config\.json"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"add_bos_token": True, "bos_token": "<nope>"}, "bos_token '<nope>'"),
        ({"add_bos_token": True, "bos_token": None}, "names no bos_token"),
    ],
)
def test_bos_that_cannot_be_found(folder: Path, changes: dict[str, Any], says: str) -> None:
    edit(folder / "tokenizer_config.json", **changes)
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.from_folder(folder)


def test_eos_token_that_cannot_be_found(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "config.json").unlink()
    edit(folder / "tokenizer_config.json", eos_token="<nope>")
    with pytest.raises(CheckpointError, match="eos_token '<nope>'"):
        Tokenizer.from_folder(folder)
