"""Guards forced calls: whatever their grammar lets through is read back as calls with valid arguments."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from selfdraft.errors import InvalidRequest
from selfdraft.text import RowText, Tokenizer
from selfdraft.text.call_grammar import call_grammar
from selfdraft.text.grammar import Grammar, Grammars
from selfdraft.text.reply import (
    FORMATS,
    ReplyEvent,
    ReplyParser,
    ToolArguments,
    ToolEnd,
    ToolFormat,
    ToolStart,
    markers,
    merged,
)

BY_NAME = {format.name: format for format in FORMATS}
STYLES = sorted(BY_NAME)
TAGGED = ("glm", "mimo", "qwen-xml")
END = "<|end|>"


def byte_level(added: Sequence[str], *, special: bool) -> Tokenizer:
    """Bytes, and markers that are tokens of their own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END])
    (library.add_special_tokens if special else library.add_tokens)(list(added))
    return Tokenizer(library, eos_ids=[len(alphabet)])


class Caller:
    """A style of calls with a tokenizer that has its markers, flagged special or not, or none of them."""

    def __init__(self, tokenizer: Tokenizer, format: ToolFormat) -> None:
        self.tokenizer = tokenizer
        self.format = format
        self.grammars = Grammars(tokenizer)

    def grammar(self, tools: Sequence[Mapping[str, Any]], **given: Any) -> Grammar:
        return call_grammar(self.grammars, self.tokenizer, self.format, tools, **given)

    def text(self, ids: Sequence[int]) -> str:
        row = RowText(self.tokenizer, keep=markers(self.format))
        row.push(ids)
        return row.finish()

    def parse(self, tools: Sequence[Mapping[str, Any]], text: str) -> list[ReplyEvent]:
        parser = ReplyParser(self.format, tools, in_reasoning=False)
        return merged([*parser.push(text), *parser.finish()])

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Whether the whole text is a sentence; markers that are tokens come as tokens."""
        sentence = grammar.start()
        for token in self.tokenizer.encode(text, special=True):
            if not sentence.allowed(())[0, token]:
                return False
            sentence.emit([token])
        return bool(sentence.allowed(())[0, min(self.tokenizer.eos_ids)])


@pytest.fixture(scope="module")
def callers(tokenizer: Tokenizer) -> dict[str, list[Caller]]:
    """For each style the reference tokenizer, and small ones with the style's markers, flagged special or not."""
    return {
        name: [
            Caller(tokenizer, format),
            Caller(byte_level(sorted(format.markers), special=True), format),
            Caller(byte_level(sorted(format.markers), special=False), format),
        ]
        for name, format in BY_NAME.items()
    }


def tool(name: str = "f", /, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def calls(events: Sequence[ReplyEvent]) -> list[tuple[str, Any]]:
    """(name, arguments) of the calls, of which there is nothing else and all are complete."""
    names = [event.name for event in events if isinstance(event, ToolStart)]
    given = [json.loads(event.json) for event in events if isinstance(event, ToolArguments)]
    assert len(events) == 3 * len(names), events
    assert all(event.complete for event in events if isinstance(event, ToolEnd))
    return list(zip(names, given, strict=True))


# --- what may come out is valid

PIECES = [
    *(
        "</parameter>",
        "\n</parameter>\n",
        "</arg_value>",
        "</function>",
        "<tool_call>",
        "<",
        "</",
        '"',
        "'",
        "\\",
        "\n",
    ),
    *("null", "None", "true", "12", " 12", "-1.5e3", "[", "{", "}", "]", '{"a": 1}', ",", ":", "é🙂", "\u2028", "\x01"),
]
CLOSING = [
    *("\n</parameter>\n", "</parameter>", "</arg_value>", "\n```", "</function>", "</tool_call>", '"', "}", "]", "0"),
]


def walk(caller: Caller, grammar: Grammar, dice: random.Random, steps: int) -> list[int] | None:
    """A sentence by chance, with a liking for what could break it; None if it does not come to an end."""
    sentence = grammar.start()
    ids: list[int] = []
    planned: list[int] = []
    ends = sorted(caller.tokenizer.eos_ids)
    for step in range(4 * steps + 200):
        mask = sentence.allowed(())[0]
        assert mask.any(), f"a dead end behind {caller.text(ids)!r}"
        over = step > steps
        complete = bool(mask[ends].all())
        mask[ends] = False
        if complete and (over or not mask.any() or dice.random() < 0.5):
            return ids
        if not planned and dice.random() < (0.9 if over else 0.5):
            planned = caller.tokenizer.encode(dice.choice(CLOSING if over else PIECES), special=over)
        if planned and not mask[planned[0]]:
            planned = []
        token = planned.pop(0) if planned else int(dice.choice(np.flatnonzero(mask)))
        sentence.emit([token])
        ids.append(token)
    return None


STRINGS = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "minLength": 1},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "string", "pattern": "^a[/b]+$"},
        {"type": "string", "pattern": r"\d/|^x"},
        {"enum": ["red", "1", "null", "a b\n", "[x", 'é"</']},
        {"const": "only"},
        {"$ref": "#/$defs/Colour"},
        {"allOf": [{"type": "string", "minLength": 1}, {"$ref": "#/$defs/Short"}]},
        {"oneOf": [{"const": "one"}, {"const": "two", "title": "2"}]},
        {"type": "string", "format": "date"},
    ]
)
OTHERS = st.sampled_from(
    [
        {"type": "integer", "minimum": -3, "maximum": 40},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "array", "items": {"$ref": "#/$defs/Colour"}, "maxItems": 2},
        {"type": "array", "items": {"type": "string"}},
        {"type": "object", "properties": {"é": {"type": "string"}, "n": {"type": "integer"}}, "required": ["é"]},
        {"enum": [1, None, [2], {"a": "b"}]},
    ]
)
MIXED = st.one_of(
    st.sampled_from([{}, True, {"enum": ["1", 2, "true", "x", None]}]),
    st.sampled_from([{"type": ["string", kind]} for kind in ("null", "integer", "array")]),
    st.builds(
        lambda kind, other: {"anyOf": [kind, other]},
        STRINGS,
        st.sampled_from(
            [{"type": "null"}, {"type": "boolean"}, {"type": "number"}, {"type": "array", "items": {"type": "integer"}}]
        ),
    ),
)
DEFS = {"Colour": {"enum": ["red", "bl\nue"]}, "Short": {"type": "string", "maxLength": 3}}
NAMES = st.sampled_from(["a", "path", "größe", "x-y", "数", "$n", "a b"])


@st.composite
def declared(draw: st.DrawFn) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, st.one_of(STRINGS, OTHERS, MIXED), max_size=3))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    closed = draw(st.sampled_from([{}, {"additionalProperties": False}]))
    name = draw(st.sampled_from(["f", "mcp__files.read", "größe:1"]))
    return tool(name, properties=properties, required=required, **{"$defs": DEFS}, **closed)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    style=st.sampled_from(STYLES),
    which=st.integers(0, 2),
    one=declared(),
    more=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_whatever_comes_out_is_read_back_as_valid_calls(
    callers: dict[str, list[Caller]], style: str, which: int, one: dict[str, Any], more: bool, seed: int
) -> None:
    caller = callers[style][which]
    other = tool("other", properties={"q": {"type": "string"}})
    tools = [one, other] if more else [one]
    ids = walk(caller, caller.grammar(tools), random.Random(seed), steps=40)
    assume(ids is not None)
    assert ids is not None
    text = caller.text(ids)
    schemas = {entry["function"]["name"]: entry["function"]["parameters"] for entry in tools}
    found = calls(caller.parse(tools, text))
    assert found, text
    for name, arguments in found:
        jsonschema.validate(arguments, schemas[name])


# --- what a model may want to say is let through


def written(style: str, name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the style's own template writes it."""
    text = json.dumps(arguments, ensure_ascii=False)
    raw = {key: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for key, v in arguments.items()}
    match style:
        case "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
        case "qwen-xml":
            inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in raw.items())
            return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"
        case "mimo":
            inner = "".join(f"<parameter={key}>{value}</parameter>" for key, value in raw.items())
            return f"<tool_call><function={name}>{inner}</function></tool_call>"
        case "glm":
            parts = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in raw.items()]
            return f"<tool_call>{name}\n{''.join(parts)}</tool_call>"
        case "deepseek-v3":
            return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
        case _:
            return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"


def joined(style: str, *calls: str) -> str:
    inner = ("" if style == "deepseek-v3.1" else "\n").join(calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>" if style.startswith("deepseek") else inner


FREE = tool(
    properties={
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "any": {},
        "list": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object", "properties": {"colour": {"$ref": "#/$defs/Colour"}}},
    },
    **{"$defs": DEFS},
)
WORDS = [piece for piece in PIECES if piece not in ("</parameter>", "\n</parameter>\n", "</arg_value>", "<tool_call>")]
TEXT = st.lists(st.sampled_from([*WORDS, "a", " "]), max_size=6).map("".join)
# What between tags is read as JSON where JSON is allowed cannot be said as a string there.
PLAIN = TEXT.filter(lambda text: text.strip()[:1] not in ("[", "{") and text.strip() not in ("null", "None"))
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXT,
        "maybe": st.none() | PLAIN,
        "any": st.none() | st.integers() | st.booleans() | st.just(["a"]) | st.just("plain text"),
        "list": st.lists(st.text(alphabet='a"\\\n</>é🙂', max_size=4), max_size=2),
        "deep": st.just({}) | st.sampled_from([{"colour": "red"}, {"colour": "bl\nue"}]),
    },
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(style=st.sampled_from(STYLES), which=st.integers(0, 2), arguments=ARGUMENTS)
def test_what_a_template_writes_is_let_through_and_read_back(
    callers: dict[str, list[Caller]], style: str, which: int, arguments: dict[str, Any]
) -> None:
    caller = callers[style][which]
    order = FREE["function"]["parameters"]["properties"]
    arguments = {key: arguments[key] for key in order if key in arguments}
    text = joined(style, written(style, "f", arguments), written(style, "g", {}))
    assert caller.accepts(caller.grammar([FREE, tool("g")]), text), text
    assert calls(caller.parse([FREE, tool("g")], text)) == [("f", arguments), ("g", {})]


@pytest.mark.parametrize("style", STYLES)
def test_one_call_one_tool_and_nothing_else(callers: dict[str, list[Caller]], style: str) -> None:
    caller = callers[style][1]
    f, g = written(style, "f", {}), written(style, "g", {})
    tools = [tool("f"), tool("g")]
    several, single = caller.grammar(tools), caller.grammar(tools, several=False)
    named = caller.grammar(tools, name="g", several=False)
    assert caller.accepts(several, joined(style, f, g, f))
    assert caller.accepts(single, joined(style, f))
    assert caller.accepts(named, joined(style, g))
    assert not caller.accepts(single, joined(style, f, g))
    assert not caller.accepts(named, joined(style, f))
    assert not caller.accepts(several, joined(style, written(style, "h", {})))
    assert not caller.accepts(several, "Well: " + joined(style, f))
    assert not caller.accepts(several, joined(style, f) + "!")
    assert not caller.accepts(several, "")


def test_white_space_in_json_is_bounded(callers: dict[str, list[Caller]]) -> None:
    """It could go on for ever."""
    one = tool(properties={"a": {"type": "array"}})
    for style in STYLES:
        caller = callers[style][1]
        text = joined(style, written(style, "f", {"a": [1]}))
        assert caller.accepts(caller.grammar([one]), text.replace("[1]", "[\n  1]"))
        assert not caller.accepts(caller.grammar([one]), text.replace("[1]", "[" + "\n" * 9 + "1]"))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("given", "valid"),
    [
        ({}, False),
        ({"n": 3}, True),
        ({"n": 9}, False),
        ({"n": 3, "s": "red"}, True),
        ({"n": 3, "s": "green"}, False),
        ({"n": 3, "s": None}, True),
        ({"n": 3, "m": "12"}, False),
        ({"n": 3, "m": "1-2"}, True),
        ({"n": 3, "x": 1}, False),
    ],
)
def test_a_schema_is_enforced(callers: dict[str, list[Caller]], style: str, given: dict[str, Any], valid: bool) -> None:
    one = tool(
        properties={
            "n": {"type": "integer", "minimum": 1, "maximum": 5},
            "s": {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]},
            "m": {"type": "string", "pattern": "-"},
        },
        required=["n"],
        additionalProperties=False,
        **{"$defs": DEFS},
    )
    caller = callers[style][0]
    assert caller.accepts(caller.grammar([one]), joined(style, written(style, "f", given))) == valid


@pytest.mark.parametrize("style", TAGGED)
@pytest.mark.parametrize(
    ("kind", "raw", "let_through"),
    [
        ({"type": ["string", "integer"]}, "12", True),
        ({"type": ["string", "integer"]}, "1.5", False),  # would be read as a number, which is not allowed
        ({"type": ["string", "integer"]}, "1.5 m", True),
        ({"type": ["string", "boolean"]}, "False", False),
        ({"type": ["string", "boolean"]}, "false", True),
        ({"anyOf": [{"enum": ["a"]}, {"type": "number"}]}, "a", True),
        ({"anyOf": [{"enum": ["a"]}, {"type": "number"}]}, "b", False),
        ({"enum": ["1", 2]}, "1", False),
        ({"enum": ["1", 2]}, "2", True),
        ({"type": ["string", "array"]}, "[a]", False),
        ({"type": ["string", "array"]}, '["a"]', True),
        ({"type": "string", "pattern": r"^a|b$"}, "ax", True),
        ({"type": "string", "pattern": r"^a|b$"}, "xb", True),
        ({"type": "string", "pattern": r"^a|b$"}, "xa", False),
        ({"type": "string", "pattern": r"^(a|[|$])\$"}, "|$", True),
        ({"type": "string", "pattern": r"^(a|[|$])\$"}, "|", False),
        ({"oneOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}]}, "abcd", True),
        ({"oneOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}]}, "abc", False),
        ({"oneOf": [{"const": f"choice {n}"} for n in range(300)]}, "choice 299", True),
        ({"oneOf": [{"const": "a"}, {"const": "b"}, {"const": "a"}]}, "a", False),
        ({"oneOf": [{"const": "a"}, {"const": "b"}, {"const": "a"}]}, "b", True),
        ({"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "string", "maxLength": 1}]}, "a", False),
        ({"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "string", "maxLength": 1}]}, "c", True),
        ({"anyOf": [False, {"const": "a"}]}, "a", True),
    ],
)
def test_raw_values(callers: dict[str, list[Caller]], style: str, kind: Any, raw: str, let_through: bool) -> None:
    one = tool(properties={"a": kind}, required=["a"])
    caller = callers[style][1]
    assert caller.accepts(caller.grammar([one]), written(style, "f", {"a": raw})) == let_through


def test_a_schema_that_is_a_reference(callers: dict[str, list[Caller]]) -> None:
    parameters = {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"a": {"type": "string"}}}}}
    one = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for style in STYLES:
        text = joined(style, written(style, "f", {"a": "12"}))
        assert callers[style][0].accepts(callers[style][0].grammar([one]), text)
        assert calls(callers[style][0].parse([one], text)) == [("f", {"a": "12"})]


# --- what is refused

# Ten levels of twenty references each.
MULTIPLIED: dict[str, Any] = {
    str(level): {"anyOf": [{"$ref": f"#/$defs/{level + 1}"}, *({"allOf": [{"$ref": f"#/$defs/{level + 1}"}]},) * 20]}
    for level in range(10)
} | {"10": {"type": "string"}}


@pytest.mark.parametrize(
    ("styles", "parameters", "feature"),
    [
        (STYLES, {"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        (STYLES, {"properties": {"a": {"not": {"type": "string"}}}}, "not"),
        (STYLES, {"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "look-ahead"),
        (STYLES, {"properties": {"a": {"$ref": "#/$defs/Missing"}}}, "Missing"),
        (STYLES, {"if": {"required": ["a"]}}, "if"),
        (STYLES, {"type": "array"}, "array"),
        (STYLES, {"properties": {"a": {"type": "string", "pattern": "a?" * 8000}}}, "8192"),
        (TAGGED, {"properties": {"a": {"type": "string", "pattern": "a(^b)"}}}, "lookarounds"),
        (TAGGED, {"properties": {"a": {"type": "string", "minLength": "3"}}}, "minLength"),
        (TAGGED, {"properties": {"a": {"type": "string", "enum": 5}}}, "enum"),
        (TAGGED, {"properties": {"a": {"type": ["string", "number"], "minimum": 3}}}, "minimum"),
        (TAGGED, {"anyOf": [{"required": ["a"]}]}, "anyOf"),
        (TAGGED, {"minProperties": 2}, "minProperties"),
        (TAGGED, {"properties": {"a>b": {}}}, "a>b"),
        (TAGGED, {"required": ["a"], "additionalProperties": False}, "'a' is required"),
        (TAGGED, {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}}, "itself"),
        (TAGGED, {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": MULTIPLIED}, "so large"),
    ],
)
def test_what_cannot_be_enforced_is_named(
    callers: dict[str, list[Caller]], styles: Sequence[str], parameters: dict[str, Any], feature: str
) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": parameters}}
    for style in styles:
        with pytest.raises(InvalidRequest, match=feature) as caught:
            callers[style][0].grammar([tool("fine"), bad])
        assert caught.value.param == "tools"
        assert "tool 'bad'" in str(caught.value)
        assert "call_0" not in str(caught.value)


def test_what_cannot_be_enforced_may_be_let_go(callers: dict[str, list[Caller]]) -> None:
    odd = {"type": ["string", "number"], "minimum": 3}
    one = tool(properties={"a": odd, "b": {"type": "array", "uniqueItems": True}}, **{"if": {"required": ["a"]}})
    for style in STYLES:
        text = joined(style, written(style, "f", {"a": "x", "b": [1, 1]}))
        assert callers[style][0].accepts(callers[style][0].grammar([one], strict=False), text)


def test_no_call_can_be_forced(callers: dict[str, list[Caller]], tokenizer: Tokenizer) -> None:
    caller = callers["glm"][0]
    with pytest.raises(InvalidRequest, match="'h', which is not among"):
        caller.grammar([tool("f")], name="h")
    with pytest.raises(InvalidRequest, match="writes no tool calls"):
        call_grammar(caller.grammars, tokenizer, None, [tool("f")])


def test_many_tools_are_no_grammar_of_a_client(callers: dict[str, list[Caller]]) -> None:
    """The bound on grammars that clients send does not hold for those that are made of their tools."""
    wide = [tool(f"f{n}", properties={f"p{m}": {"type": "string"} for m in range(12)}) for n in range(60)]
    caller = callers["qwen-xml"][0]
    assert caller.accepts(caller.grammar(wide), written("qwen-xml", "f59", {"p11": "x"}))
