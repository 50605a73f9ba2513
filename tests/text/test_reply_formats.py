"""Guards: the call syntax is told from the template, and its markers survive detokenisation."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from selfdraft.text import RowText, Tokenizer
from selfdraft.text.reply import FORMATS, begins_in_reasoning, detect_format, markers

# How templates of each family spell a call, cut down to that.
TEMPLATES = {
    "qwen-xml": r"{{- '<tool_call>\n<function=' + call.name + '>\n' }}{{- '<parameter=' + key + '>\n' }}"
    r"{{- value }}{{- '\n</parameter>\n' }}{{- '</function>\n</tool_call>' }}",
    "mimo": r"{{- '\n<parameter>\n<name>' ~ name ~ '</name>\n</parameter>' }}"
    r"{{- '<tool_call><function=' ~ call.name ~ '>' }}"
    r"{{- '<parameter=' ~ key ~ '>' ~ value ~ '</parameter>' }}{{- '</function></tool_call>' }}",
    "hermes": r"""{{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) }}"""
    r"{{- '}\n</tool_call>' }}",
    "glm": "<tool_call>{function-name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
    "deepseek-v3": r"{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name }}"
    r"{{ '\n```json\n' + arguments }}",
    "deepseek-v3.1": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_detection(name: str) -> None:
    format = detect_format(TEMPLATES[name])
    assert format is not None
    assert format.name == name


def test_every_format_has_a_template_here() -> None:
    assert {format.name for format in FORMATS} == set(TEMPLATES)


def test_the_reference_template_writes_qwen_xml(reference: Path) -> None:
    format = detect_format((reference / "chat_template.jinja").read_text(encoding="utf-8"))
    assert format is not None
    assert format.name == "qwen-xml"


@pytest.mark.parametrize("source", ["", "{{ message.content }}", "{{ '<zyphra_tool_call>' }}", "[TOOL_CALLS]"])
def test_no_format(source: str) -> None:
    assert detect_format(source) is None


def test_markers() -> None:
    assert markers(None) == {"<think>", "</think>"}
    for format in FORMATS:
        assert markers(format) >= {"<think>", "</think>", *format.opens}


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [
        ("<|assistant|>\n<think>\n", True),
        ("x<think>", True),
        ("<think>\n\n</think>\n\n", False),
        ("<think>\nso", False),
    ],
)
def test_an_open_think_block_at_the_end_of_the_prompt(prompt: str, begins: bool) -> None:
    assert begins_in_reasoning(prompt) is begins


@pytest.fixture
def special() -> Tokenizer:
    """All its tokens are special but the first; the last is also its EOS."""
    tokens = ["a", "<think>", "<pad>", "</tool_call>"]
    library = tokenizers.Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, []))
    library.add_special_tokens(tokens[1:])
    library.decoder = decoders.Fuse()
    return Tokenizer(library, eos_ids=[3])


def test_kept_tokens_show(special: Tokenizer) -> None:
    ids = [0, 1, 2, 0, 3]
    assert special.stream().push(ids) == "aa"
    assert special.stream(keep=frozenset({"<think>", "</tool_call>", "unknown"})).push(ids) == "a<think>a"
    row = RowText(special, keep=frozenset({"<think>"}))
    row.push(ids)
    assert row.finish() == "a<think>a"
    row = RowText(special)
    row.push(ids)
    assert row.finish() == "aa"
