"""Guards: every character of an answer lands in exactly one channel, however the text is cut; no marker leaks."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfdraft.text import ChatTemplate
from selfdraft.text.reply import (
    Content,
    Reasoning,
    ReplyEvent,
    ReplyParser,
    ToolArguments,
    ToolEnd,
    ToolStart,
    begins_in_reasoning,
    merged,
)
from tests.support.replies import BY_NAME, TOOLS, call, parse, qwen

V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

# (format, text, events)
CASES: dict[str, tuple[str, str, list[ReplyEvent]]] = {
    "content": ("qwen-xml", " \nHi, é🙂 ", [Content(" \nHi, é🙂 ")]),
    "nothing": ("qwen-xml", "", []),
    "reasoning": ("qwen-xml", "<think>\na\n\nb\n</think>\n\n    code", [Reasoning("a\n\nb"), Content("    code")]),
    "empty reasoning": ("qwen-xml", "\n<think>\n\n</think>\n\nHi", [Content("Hi")]),
    "open reasoning": (
        "qwen-xml",
        "<think>\nso <tool_call>\n<function=f>\n",
        [Reasoning("so <tool_call>\n<function=f>\n")],
    ),
    "think in content": ("qwen-xml", "a <think>b</think>", [Content("a <think>b</think>")]),
    "two blocks": ("qwen-xml", "<think>a</think>\n<think>b</think>c", [Reasoning("ab"), Content("c")]),
    "everything": (
        "qwen-xml",
        "<think>\nhm\n</think>\n\nLook:\n\n"
        + qwen(("text", "a"))
        + "\n"
        + qwen(("number", "3"), name="g")
        + "\n\nDone.",
        [
            Reasoning("hm"),
            Content("Look:"),
            *call('{"text": "a"}'),
            *call('{"number": 3}', index=1, name="g"),
            Content("Done."),
        ],
    ),
    "no arguments": ("qwen-xml", qwen(), call("{}")),
    "undeclared tool": ("qwen-xml", qwen(("x", "a b"), name="mcp__srv-1.h"), call('{"x": "a b"}', name="mcp__srv-1.h")),
    "white space kept inside": ("qwen-xml", qwen(("text", "\n  a\t\r\n ")), call(r'{"text": "\n  a\t\r\n "}')),
    "escapes": ("qwen-xml", qwen(("text", '"q" \\n \x01 é🙂')), call(r'{"text": "\"q\" \\n \u0001 é🙂"}')),
    "empty string": ("qwen-xml", qwen(("text", "")), call('{"text": ""}')),
    "one line": (
        "qwen-xml",
        "<tool_call><function=f><parameter=text>a</parameter></function></tool_call>",
        call('{"text": "a"}'),
    ),
    "no function end": (
        "qwen-xml",
        qwen(("text", "a")).replace("</function>\n", "") + "b",
        [*call('{"text": "a"}'), Content("b")],
    ),
    "no call end": (
        "qwen-xml",
        qwen(("text", "a")).removesuffix("</tool_call>") + "b",
        [*call('{"text": "a"}'), Content("b")],
    ),
    "quoted markers": (
        "qwen-xml",
        qwen(("text", "<tool_call>\n<function=f>\n</parameter>\n</function </parameters> <think>")),
        call(r'{"text": "<tool_call>\n<function=f>\n</parameter>\n</function </parameters> <think>"}'),
    ),
    "ends in its own tag": ("qwen-xml", qwen(("text", "a</parameter>")), call('{"text": "a</parameter>"}')),
    "cut in a string": (
        "qwen-xml",
        '<tool_call>\n<function=f>\n<parameter=text>\nrm "/tm',
        call(r'{"text": "rm \"/tm', complete=False),
    ),
    "cut in a number": (
        "qwen-xml",
        "<tool_call>\n<function=f>\n<parameter=number>\n12",
        call('{"number": ', complete=False),
    ),
    "cut in a key": ("qwen-xml", "<tool_call>\n<function=f>\n<param", call("", complete=False)),
    "cut between": (
        "qwen-xml",
        "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>",
        call('{"text": "a"', complete=False),
    ),
    "cut in the name": ("qwen-xml", "a\n<tool_call>\n<function=f", [Content("a\n<tool_call>\n<function=f")]),
    "no name": ("qwen-xml", "a <tool_call>\n<function=>\n", [Content("a <tool_call>\n<function=>\n")]),
    "prose about calls": (
        "qwen-xml",
        "Use <tool_call> or <tool_call>" + qwen(),
        [Content("Use <tool_call> or <tool_call>"), *call("{}")],
    ),
    "resemblances": (
        "qwen-xml",
        "<tool <tool_call <think </think> </tool_call> <function=f> <",
        [Content("<tool <tool_call <think </think> </tool_call> <function=f> <")],
    ),
    "mimo": (
        "mimo",
        "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n<parameter=number>3</parameter>\n</function>\n</tool_call>",
        call(r'{"text": "\na\n", "number": 3}'),
    ),
    "hermes": (
        "hermes",
        'Hi\n<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}\\" {"}], "c": null}}\n</tool_call>\nB',
        [Content("Hi"), *call('{"a": [1, {"b": "}\\" {"}], "c": null}'), Content("B")],
    ),
    "hermes, name last": (
        "hermes",
        '<tool_call>{"id": [{}], "arguments": {"a": "</tool_call>"}, "name": "f"}</tool_call>',
        call('{"a": "</tool_call>"}'),
    ),
    "hermes, arguments as a string": (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\n\\"}"}\n</tool_call>',
        call('{"a": "é\\n"}'),
    ),
    "hermes, no JSON": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>b',
        [*call('{"a": 01}', complete=False), Content("b")],
    ),
    "hermes, no object": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        call("[1]", complete=False),
    ),
    "v3.1, not a number": ("deepseek-v3.1", V31.format("f", '{"a": NaN}'), call('{"a": NaN}', complete=False)),
    "hermes, no arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', call("{}")),
    "hermes, null arguments": ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', call("{}")),
    "hermes, line break in a string": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "b\nc"}}</tool_call>',
        call('{"a": "b\\nc"}'),
    ),
    "hermes, bracket too many": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>a',
        [*call("{}"), Content("a")],
    ),
    "hermes, bracket too few": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1\n</tool_call>b',
        [*call('{"a": 1\n', complete=False), Content("b")],
    ),
    "hermes, cut": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\\', call('{"a": "b\\', complete=False)),
    "hermes, cut before the bracket": ("hermes", '<tool_call>{"name": "f", "arguments": {}', call("{}")),
    "hermes, no call": (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}}</tool_call> <tool_call>["f"]',
        [Content('<tool_call>{"arguments": {"a": 1}}</tool_call> <tool_call>["f"]')],
    ),
    "hermes, no name": (
        "hermes",
        '<tool_call>{"name": "a b", "arguments": 1',
        [Content('<tool_call>{"name": "a b", "arguments": 1')],
    ),
    "glm": (
        "glm",
        "<think>a</think>\nB\n<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>x\n</arg_value> y</arg_value>\n"
        '<arg_key>list</arg_key>\n<arg_value>[1, "a\nb"]</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>',
        [
            Reasoning("a"),
            Content("B"),
            *call(r'{"text": "x\n</arg_value> y", "list": [1, "a\nb"]}'),
            *call("{}", index=1, name="g"),
        ],
    ),
    "glm, compact": (
        "glm",
        "<tool_call>f<arg_key>flag</arg_key><arg_value>true</arg_value></tool_call>",
        call('{"flag": true}'),
    ),
    "mimo, tags in a JSON string": (
        "mimo",
        '<tool_call><function=f><parameter=list>["</parameter><parameter=text>", "\\"</parameter></function>"]'
        "</parameter><parameter=number>3</parameter></function></tool_call>b",
        [
            *call('{"list": ["</parameter><parameter=text>", "\\"</parameter></function>"], "number": 3}'),
            Content("b"),
        ],
    ),
    "mimo, a quote forgotten": (
        "mimo",
        '<tool_call><function=f><parameter=list>["a]</parameter><parameter=text>x</parameter></function></tool_call>'
        "<tool_call><function=g></function></tool_call>b",
        [*call('{"list": "[\\"a]", "text": "x"}'), *call("{}", index=1, name="g"), Content("b")],
    ),
    "mimo, a quote forgotten before a quoted tag": (
        "mimo",
        '<tool_call><function=f><parameter=list>["a]</parameter><parameter=text>x</parameter> y</parameter></function>'
        "</tool_call>b",
        [*call('{"list": "[\\"a]", "text": "x</parameter> y"}'), Content("b")],
    ),
    "mimo, two quotes forgotten": (
        "mimo",
        '<tool_call><function=f><parameter=list>["a]</parameter><parameter=object>{"b: 1}</parameter></function>'
        "</tool_call>b",
        [*call('{"list": "[\\"a]", "object": "{\\"b: 1}"}'), Content("b")],
    ),
    "glm, a quote forgotten before a line break": (
        "glm",
        '<tool_call>f\n<arg_key>list</arg_key>\n<arg_value>["a]\n</arg_value>\n<arg_key>flag</arg_key>\n'
        "<arg_value>true</arg_value>\n</tool_call>b",
        [*call('{"list": "[\\"a]\\n", "flag": true}'), Content("b")],
    ),
    "glm, no call": ("glm", "a <tool_call> is <tool_call>f x", [Content("a <tool_call> is <tool_call>f x")]),
    "glm, cut": (
        "glm",
        "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</arg_",
        call('{"text": "a</arg_', complete=False),
    ),
    "v3": (
        "deepseek-v3",
        "Hi" + BEGIN + V3.format("f", '{"a": "```"}') + "\n" + V3.format("g", "{}") + END,
        [Content("Hi"), *call('{"a": "```"}'), *call("{}", index=1, name="g")],
    ),
    "v3, cut": (
        "deepseek-v3",
        BEGIN + V3.format("f", '{"a": 1')[:-20],
        call('{"a": 1\n', complete=False),
    ),
    "v3, no call": ("deepseek-v3", BEGIN + V31.format("f", "{}"), [Content(BEGIN + V31.format("f", "{}"))]),
    "v3.1": (
        "deepseek-v3.1",
        "Hi\n\n" + BEGIN + V31.format("f", '{"a": 1}') + V31.format("g", "{}") + END + "b",
        [Content("Hi"), *call('{"a": 1}'), *call("{}", index=1, name="g"), Content("b")],
    ),
    "v3.1, first marker missing": ("deepseek-v3.1", V31.format("f", "{}") + END, call("{}")),
    "v3.1, bracket missing": (
        "deepseek-v3.1",
        V31.format("f", '{"a": 1') + END + "b",
        [*call('{"a": 1', complete=False), Content("b")],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_cases(case: str) -> None:
    """As one piece and letter by letter, which is how a marker would leak."""
    format, text, events = CASES[case]
    assert parse(format, [text]) == events
    assert parse(format, text) == events
    for event in events:
        if isinstance(event, ToolArguments) and ToolEnd(event.index) in events:
            assert isinstance(json.loads(event.json), dict)


MARKUP = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=text>",
    "<parameter=number>", "<parameter=maybe>", "</parameter>", "<arg_key>", "text</arg_key>", "<arg_value>",
    "</arg_value>", '{"name": "f"', ', "arguments": ', '{"a": "', '\\"', "}", "[", '"', "\\", "null", "None", "12", "-",
    "{", ":", BEGIN, END, *V3.partition("{}"), "<｜tool▁sep｜>f", "\n```json\n", "<｜tool▁call▁end｜>",
    "\n", " ", "\r\n", "a", "é🙂", "<", "</",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    format=st.sampled_from([*BY_NAME]),
    text=st.one_of(
        st.lists(st.sampled_from(MARKUP), max_size=25).map("".join),
        st.sampled_from([text for _, text, _ in CASES.values()]),
    ),
    sizes=st.lists(st.integers(1, 9), max_size=40),
    in_reasoning=st.booleans(),
)
def test_cuts_do_not_matter(format: str, text: str, sizes: list[int], in_reasoning: bool) -> None:
    whole = parse(format, [text], in_reasoning=in_reasoning)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    assert parse(format, [*pieces, text[at:]], in_reasoning=in_reasoning) == whole
    assert parse(format, text, in_reasoning=in_reasoning) == whole
    starts = [event.index for event in whole if isinstance(event, ToolStart)]
    assert starts == [event.index for event in whole if isinstance(event, ToolEnd)] == [*range(len(starts))]
    complete = {event.index for event in whole if isinstance(event, ToolEnd) and event.complete}
    for event in whole:
        if isinstance(event, ToolArguments) and event.index in complete:
            assert isinstance(json.loads(event.json), dict)


@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.sampled_from([*MARKUP, " <think", "x<tool_call"]), max_size=20).map("".join))
def test_without_tools_only_think_blocks_are_markup(text: str) -> None:
    events = parse("qwen-xml", text, tools=[])
    assert events == parse(None, text)
    assert not any(isinstance(event, ToolStart | ToolArguments | ToolEnd) for event in events)
    if not text.lstrip().startswith("<think>"):
        assert "".join(event.text for event in events if isinstance(event, Content)) == text


ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(alphabet='ab\n\t "\\<>{}/é🙂', max_size=12),
        "colour": st.sampled_from(["red", "1"]),
        "number": st.integers(),
        "flag": st.booleans(),
        "list": st.lists(st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=3))),
        "object": st.dictionaries(st.text(max_size=2), st.booleans(), max_size=2),
        "maybe": st.one_of(st.none(), st.sampled_from(["12", "true", "[]", "n", "Nat", " a\n"])),
        "undeclared": st.one_of(st.integers(), st.booleans(), st.none(), st.lists(st.integers()), st.just("a: 1")),
    },
)


@settings(max_examples=60, deadline=None)
@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=3), content=st.sampled_from(["", "Look."]))
def test_what_the_reference_template_writes_is_read_back(
    template: ChatTemplate, calls: list[dict[str, Any]], content: str
) -> None:
    user = {"role": "user", "content": "x"}
    reply = {
        "role": "assistant",
        "content": content,
        "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": given}} for given in calls],
    }
    prompt = template.render([user], tools=TOOLS[:1], enable_thinking=True)
    written = template.render([user, reply], tools=TOOLS[:1], add_generation_prompt=False)
    assert written.startswith(prompt)
    answer = written.removeprefix(prompt).removesuffix("<|im_end|>\n")
    events = parse("qwen-xml", answer, in_reasoning=begins_in_reasoning(prompt))
    assert events[: 1 + bool(content)] == [Reasoning("hm"), *([Content(content)] if content else [])]
    assert [json.loads(event.json) for event in events if isinstance(event, ToolArguments)] == calls


@pytest.mark.parametrize(
    ("text", "in_reasoning", "expected"),
    [
        ("a", False, []),
        ("\n<think>\nab\n</think>\n\nc", False, [(8, 12)]),
        ("ab</think>c", True, [(0, 2)]),
        ("ab", True, [(0, None)]),
        ("<think>a</think> <think>b", False, [(7, 8), (24, None)]),
        # Text that looks like a call, and is read twice.
        (
            '<think></think><tool_call>{"x": 1}<tool_call>\n{"name": "f"}</tool_call>\n<think>a</think>',
            False,
            [(7, 7), (79, 80)],
        ),
    ],
)
def test_where_reasoning_stands(text: str, in_reasoning: bool, expected: list[tuple[int, int | None]]) -> None:
    for size in (1, 2, len(text)):
        parser = ReplyParser(BY_NAME["hermes"], TOOLS, in_reasoning=in_reasoning)
        for at in range(0, len(text), size):
            parser.push(text[at : at + size])
        parser.finish()
        assert parser.thought == expected


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Hello", "Hello"),
        ("a < b", "a < b"),
        ("Hello <to", "Hello"),
        ("Hello <tool_cx", "Hello <tool_cx"),
        ("Hello <tool_call>\n<function=f", "Hello"),
        ("Hello <tool_call>x", "Hello <tool_call>x"),
        ("<think>\nabc</thin", "abc"),
        ("<think>\nabc</thing", "abc</thing"),
        ("<thi", ""),
        ("<tha", "<tha"),
    ],
)
def test_no_more_is_held_back_than_could_be_a_marker(text: str, shown: str) -> None:
    parser = ReplyParser(BY_NAME["qwen-xml"], TOOLS, in_reasoning=False)
    events = merged([event for piece in text for event in parser.push(piece)])
    assert "".join(event.text for event in events if isinstance(event, Content | Reasoning)) == shown


@pytest.mark.parametrize(
    ("format", "text", "arguments"),
    [
        ("qwen-xml", "<tool_call>\n<function=f>\n<parameter=text>\nab\ncd\n</para", '{"text": "ab\\ncd'),
        ("qwen-xml", "<tool_call>\n<function=f>\n<parameter=maybe>\n ab", '{"maybe": " ab'),
        ("glm", "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>ab", '{"text": "ab'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "b', '{"a": "b'),
        ("hermes", '<tool_call>\n{"arguments": {"a": "b"}, "name": "f"', '{"a": "b"}'),
        ("deepseek-v3.1", BEGIN + "<｜tool▁call▁begin｜>f<｜tool▁sep｜>" + '{"a": "b', '{"a": "b'),
    ],
)
def test_arguments_stream(format: str, text: str, arguments: str) -> None:
    """Before the call is over, all that came is out."""
    parser = ReplyParser(BY_NAME[format], TOOLS, in_reasoning=False)
    assert merged([event for piece in text for event in parser.push(piece)]) == [
        ToolStart(0, "f"),
        ToolArguments(0, arguments),
    ]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("qwen-xml", qwen(("text", '<a"\n' * 25_000))),
        ("qwen-xml", qwen(("text", "</parameter>\n" * 3_000))),
        ("qwen-xml", qwen(("object", '{"a": ' * 6_000))),
        ("qwen-xml", "<tool_call>\n<function=" + "f" * 40_000),
        ("qwen-xml", "<tool_call>" * 4_000),
        ("qwen-xml", "a" + " \n" * 20_000),
        ("hermes", '<tool_call>{"arguments": {"a": "' + "<a'\\\"" * 8_000 + '"}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"a": "' * 2_000),
        ("glm", "<tool_call>" + "f" * 40_000),
    ],
)
def test_letter_by_letter_takes_linear_time(format: str, text: str) -> None:
    """Up to 100 kB; bounded so that even a busy machine passes if the work per character is constant."""
    start = time.process_time()
    parse(format, text)
    assert time.process_time() - start < 2
