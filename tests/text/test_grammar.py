"""Guards grammars as masks: what they let through, where a sentence may end, and which grammars are refused."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from selfdraft.errors import InvalidRequest
from selfdraft.text import Tokenizer
from selfdraft.text.call_grammar import call_grammar
from selfdraft.text.grammar import MAX_LARK, MAX_NESTING, MAX_REGEX, MAX_SCHEMA, Grammar, Grammars, Sentence
from selfdraft.text.reply.hermes import HERMES
from selfdraft.text.reply.qwen_xml import QWEN_XML

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def accepts(grammar: Grammar, tokenizer: Tokenizer, text: str, *, special: bool = False) -> bool:
    """Whether the whole text is a sentence; ends must be allowed there and nowhere before that is not complete."""
    sentence = grammar.start()
    for token in tokenizer.encode(text, special=special):
        if not sentence.allowed(())[0, token]:
            return False
        sentence.emit([token])
    return ends(sentence, tokenizer)


def ends(sentence: Sentence, tokenizer: Tokenizer) -> bool:
    flags = {bool(flag) for flag in sentence.allowed(())[0, sorted(tokenizer.eos_ids)]}
    assert len(flags) == 1
    return flags.pop()


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ('{"name": "Zoé", "age": 3}', True),
        ('{"name":"a","age":0}', True),
        ('{\n  "name": "a",\n  "age": 0\n}', True),
        ('{"name": "a"}', False),
        ('{"name": "a", "age": -1}', False),
        ('{"name": "a", "age": 1, "more": 2}', False),
        ('{"name": "a", "age": 1', False),
        (' {"name": "a", "age": 1}', False),
        ('{"name": "a", "age": 1}\n', False),
        ("{" + "\n" * 9 + '"name": "a", "age": 1}', False),  # white space is bounded: it could go on for ever
    ],
)
def test_a_schema(grammars: Grammars, tokenizer: Tokenizer, text: str, accepted: bool) -> None:
    assert accepts(grammars.json_schema(PERSON), tokenizer, text) == accepted
    assert accepts(grammars.json_schema(json.dumps(PERSON)), tokenizer, text) == accepted


BLANKS = ["\n", " ", "\t", "\r", "\n\n", "    ", "        "]
LONGEST = 42  # two line breaks and an indentation
CALLS = {
    "call": (HERMES, '<tool_call>\n{"name": "f", "arguments": ', lambda schema: schema),
    "argument": (
        QWEN_XML,
        "<tool_call>\n<function=f>\n<parameter=x>\n",
        lambda schema: {"type": "object", "properties": {"x": schema}},
    ),
}
LIST = {"properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}


def longest_blank(grammar: Grammar, tokenizer: Tokenizer, before: str) -> int:
    """How many characters of white space a model can write behind a text, if it writes nothing else."""
    (ids, *blanks) = (tokenizer.encode(text, special=True) for text in (before, *BLANKS))
    longest = 0
    for first in range(len(BLANKS)):  # which blank it likes best
        liked = [token for blank in blanks[first:] + blanks[:first] for token in blank]
        sentence, run = grammar.start(), 0
        sentence.emit(ids)
        while run < 500 and (token := next((t for t in liked if sentence.allowed(())[0, t]), None)) is not None:
            sentence.emit([token])
            run += len(tokenizer.token_text(token))
        longest = max(longest, run)
    return longest


@pytest.mark.parametrize("before", ["{", '{"a"', '{"a":', '{"a": [', '{"a": [1', '{"a": [1,', '{"a": [1]', "{\n  "])
@pytest.mark.parametrize("kind", ["schema", "object", "call", "argument"])
def test_no_run_of_white_space_goes_on_for_ever(
    grammars: Grammars, tokenizer: Tokenizer, kind: str, before: str
) -> None:
    """A model that falls into one would write blanks up to its limit."""
    schema = {"type": "object", **LIST}
    opening, grammar = "", grammars.json_schema(schema)
    if kind == "object":
        grammar = grammars.json_object()
    elif kind in CALLS:
        format, opening, parameters = CALLS[kind]
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters(schema)}}]
        grammar = call_grammar(grammars, tokenizer, format, tools)
    assert longest_blank(grammar, tokenizer, opening + before) <= LONGEST
    for text in ('{"a":[1,2]}', '{"a": [1, 2]}', json.dumps({"a": [1, 2]}, indent=2), json.dumps({"a": [1]}, indent=8)):
        sentence = grammar.start()
        for token in tokenizer.encode(opening + text, special=True):
            assert sentence.allowed(())[0, token], text
            sentence.emit([token])


def test_other_grammars(grammars: Grammars, tokenizer: Tokenizer) -> None:
    assert accepts(grammars.json_object(), tokenizer, '{"a": [1, {"b": null}], "c": 1.5e3}')
    assert not accepts(grammars.json_object(), tokenizer, "[1]")
    assert accepts(grammars.regex(r"\d{3}-[ab]+"), tokenizer, "123-abba")
    assert not accepts(grammars.regex(r"\d{3}-[ab]+"), tokenizer, "123-abc")
    assert accepts(grammars.lark('start: "yes" | "no" WORD?\nWORD: /, [a-z]+/'), tokenizer, "no, thanks")
    tool = grammars.lark("start: <tool_call> NAME </tool_call>\nNAME: /[a-z]+/")
    assert accepts(tool, tokenizer, "<tool_call>search</tool_call>", special=True)
    assert not accepts(tool, tokenizer, "<tool_call>search</tool_call>")  # spelled out, it is other tokens


def test_text_that_spells_a_special_token_can_be_forced(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """The library would force the token there, and then refuse it as no text."""
    assert accepts(grammars.lark('start: "<think>a</think>"'), tokenizer, "<think>a</think>")
    assert accepts(grammars.json_schema({"const": "<|im_end|>"}), tokenizer, '"<|im_end|>"')
    assert not accepts(grammars.lark('start: "<think>a"'), tokenizer, "<think>a", special=True)


def test_special_tokens_are_no_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    sentence = grammars.regex("(?s:.)*").start()
    mask = sentence.allowed(())[0]
    assert mask.sum() > tokenizer.vocab_size // 2
    assert not mask[sorted(tokenizer.special_ids - tokenizer.eos_ids)].any()
    assert ends(sentence, tokenizer)


def test_nothing_but_an_end_follows_a_complete_sentence(grammars: Grammars, tokenizer: Tokenizer) -> None:
    sentence = grammars.regex("ab").start()
    assert not ends(sentence, tokenizer)
    sentence.emit(tokenizer.encode("ab", special=False))
    assert set(np.flatnonzero(sentence.allowed(())[0])) == tokenizer.eos_ids
    sentence.emit([min(tokenizer.eos_ids)])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["schema", "regex", "after"]))
def test_masks_along_drafts_are_those_of_emitting_them(
    grammars: Grammars, tokenizer: Tokenizer, seed: int, kind: str
) -> None:
    """And asking about drafts leaves nothing behind, whatever is drafted."""
    schema = grammars.json_schema(PERSON)
    grammar = {"schema": schema, "regex": grammars.regex("(ab|c)+d?"), "after": schema.after("; b")}[kind]
    dice = random.Random(seed)
    sentence = grammar.start()
    before: list[int] = []
    for _ in range(6):
        drafts = walk(grammar, before, dice)
        masks = sentence.allowed(drafts)
        assert masks.shape == (len(drafts) + 1, tokenizer.vocab_size)
        for position, mask in enumerate(masks):
            other = grammar.start()
            other.emit(before + drafts[:position])
            assert np.array_equal(other.allowed(())[0], mask)
            token = drafts[position] if position < len(drafts) else None
            if token is not None and (token >= len(mask) or not mask[token] or token in tokenizer.eos_ids):
                break
        else:
            position = len(drafts)
        kept = drafts[: dice.randint(0, position)]
        sentence.emit(kept)
        before += kept


def walk(grammar: Grammar, before: list[int], dice: random.Random) -> list[int]:
    """Up to four drafts, mostly allowed ones; ids beyond the vocabulary too."""
    sentence = grammar.start()
    sentence.emit(before)
    drafts: list[int] = []
    for _ in range(dice.randint(0, 4)):
        choices = np.flatnonzero(sentence.allowed(())[0])
        token = int(dice.choice(choices)) if dice.random() < 0.85 else dice.randrange(9000)
        drafts.append(token)
        if token not in choices:
            break
        sentence.emit([token])
    return drafts


# --- behind free text


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("gap", ["", "\n", "\n\n"])
def test_after_a_marker(grammars: Grammars, tokenizer: Tokenizer, special: bool, gap: str) -> None:
    """The marker is one token, or spelled out; anything may stand before it."""
    grammar = grammars.json_schema(PERSON).after("</think>")
    person = '{"name": "a", "age": 1}'
    thought = 'Well: {"name" </thin </think'
    for text, accepted in [(thought + "</think>" + gap + person, True), (thought + person, False)]:
        pieces = [piece for piece in (text.partition("</think>")[0], "</think>", gap, person) if piece]
        if not accepted:
            pieces = [text]
        sentence = grammar.start()
        ids = [token for piece in pieces for token in tokenizer.encode(piece, special=special)]
        for token in ids:
            assert sentence.allowed(())[0, token]
            assert not ends(sentence, tokenizer)
            sentence.emit([token])
        assert ends(sentence, tokenizer) == accepted


def test_only_the_grammar_follows_the_marker(grammars: Grammars, tokenizer: Tokenizer) -> None:
    sentence = grammars.json_schema(PERSON).after("</think>").start()
    (marker,) = tokenizer.encode("</think>", special=True)
    (x,) = tokenizer.encode("x", special=False)
    masks = sentence.allowed([x, marker, x])
    assert masks[1, x]
    assert masks[1, marker]
    assert not masks[2, x]
    assert not masks[2, marker]
    brace = tokenizer.encode("{", special=False)[0]
    assert masks[2, brace]


def test_no_token_reaches_beyond_the_marker(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """A token that ends the marker and begins the answer would carry text that no grammar saw."""
    longer = next(
        (id, text)
        for id in range(tokenizer.vocab_size)
        if (text := tokenizer.token_text(id)).isalpha() and len(text) > 3
    )
    id, text = longer
    marker = "#" + text[:2]
    sentence = grammars.regex("ok").after(marker).start()
    assert sentence.allowed(())[0, id]
    sentence.emit(tokenizer.encode("#", special=False))
    assert not sentence.allowed(())[0, id]


@pytest.mark.parametrize("kind", ["schema", "lark", "regex", "either"])
def test_every_kind_of_grammar_can_come_later(grammars: Grammars, tokenizer: Tokenizer, kind: str) -> None:
    schema = grammars.json_schema({"type": "object", "additionalProperties": False})
    lark, regex = grammars.lark('start: "{}"'), grammars.regex("[{][}]")
    grammar = {"schema": schema, "lark": lark, "regex": regex, "either": lark.or_else(schema)}[kind]
    assert accepts(grammar, tokenizer, "{}")
    assert accepts(grammar.after("</think>"), tokenizer, "so</think>\n\n{}", special=True)
    assert not accepts(grammar.after("</think>"), tokenizer, "{}")


def test_one_grammar_or_another(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = grammars.lark('start: <tool_call> "x"').or_else(grammars.json_schema(PERSON))
    for text, accepted in [("<tool_call>x", True), ('{"name": "a", "age": 1}', True), ("x", False), ("{}", False)]:
        assert accepts(grammar, tokenizer, text, special=True) == accepted
    both = '<tool_call>x{"name": "a", "age": 1}'
    assert not accepts(grammar, tokenizer, both, special=True)


# --- what is refused


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objekt"}, "objekt"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "nonsense"}, "nonsense"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"$ref": "http://example.com/schema"}, "example.com"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "minLength"),
        ({"enum": ["\ud800"]}, "surrogate"),
        ({"const": float("nan")}, "not JSON"),
        ({"const": object()}, "not JSON"),
        ({"patternProperties": 3}, "patternProperties"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "list"),
        ({"description": "x" * MAX_SCHEMA}, str(MAX_SCHEMA)),
        ("x" * (MAX_SCHEMA + 1), str(MAX_SCHEMA)),
        ({"properties": {"a": {"pattern": "a?" * MAX_REGEX}}}, str(MAX_REGEX)),
        ({"patternProperties": {"a?" * MAX_REGEX: {}}}, str(MAX_REGEX)),
    ],
)
def test_schemas_that_are_refused(grammars: Grammars, schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match="(?s)" + reason.replace("$", r"\$")) as caught:
        grammars.json_schema(schema)
    assert caught.value.param == "json_schema"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_nesting_is_bounded(grammars: Grammars) -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_NESTING - 1):
        schema = {"items": schema}
    grammars.json_schema(schema)
    with pytest.raises(InvalidRequest, match="deeper than 64"):
        grammars.json_schema({"items": schema})


def test_grammars_and_expressions_that_are_refused(grammars: Grammars) -> None:
    for text, reason in [("start: missing", "missing"), ("x", "grammar"), ("start: /[/", "unclosed"), ("", "grammar")]:
        with pytest.raises(InvalidRequest, match=reason):
            grammars.lark(text)
    for pattern, reason in [("[", "unclosed"), (r"(a)\1", "backreference"), ("\ud800", "surrogate")]:
        with pytest.raises(InvalidRequest, match=reason):
            grammars.regex(pattern)
    for call, most in [(grammars.lark, MAX_LARK), (grammars.regex, MAX_REGEX)]:
        with pytest.raises(InvalidRequest, match=str(most)):
            call("a" * (most + 1))


def test_long_chains_of_references_do_not_overflow_the_stack(grammars: Grammars) -> None:
    """On a thread's ordinary stack this ended the process."""
    chain = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1500)}
    grammars.json_schema({"$ref": "#/$defs/d0", "$defs": {**chain, "d1500": {"type": "string"}}})


def test_a_grammar_beyond_the_limits_is_a_dead_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """This expression exceeds the limits at its second character."""
    grammar = grammars.regex("a?" * 4000)
    beside, sentence = grammar.start(), grammar.start()
    (a,) = tokenizer.encode("a", special=False)
    first = beside.allowed(())
    masks = sentence.allowed([a, a])
    assert np.array_equal(masks[:1], first)
    assert not masks[1:].any()
    sentence.emit([a])
    assert not sentence.allowed(()).any()
    # The limit was met in a lexer that others share: they and later ones get a fresh one.
    assert np.array_equal(beside.allowed(()), first)
    assert np.array_equal(grammar.start().allowed(()), first)


def test_a_row_whose_lexer_others_filled_up_goes_on_where_it_was(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = grammars.json_schema(PERSON)
    (start, rest) = (tokenizer.encode(text, special=False) for text in ('{"name": "', 'Zoé", "age": 3}'))
    sentence, undisturbed = grammar.start(), grammar.start()
    for one in (sentence, undisturbed):
        one.emit(start)
    sentence._matcher.consume_token(9000)  # type: ignore[attr-defined]
    assert sentence._matcher.is_error()  # type: ignore[attr-defined]
    assert np.array_equal(sentence.allowed(rest), undisturbed.allowed(rest))
    sentence.emit(rest)
    assert ends(sentence, tokenizer)


# --- tokenizers


def test_a_tokenizer_without_end_tokens(fallback: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="end token"):
        Grammars(fallback)


def test_an_end_token_that_is_not_flagged_is_no_text() -> None:
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "</s>": 2}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    sentence = Grammars(Tokenizer(library, eos_ids=[2])).regex("[^a]*a").start()
    assert sentence.allowed(())[0].tolist() == [True, True, False]
    sentence.emit([0])
    assert sentence.allowed(())[0].tolist() == [False, False, True]


def test_other_kinds_of_tokenizers(fallback: Tokenizer, wordpiece: Tokenizer) -> None:
    """Byte fallback, and one whose tokens are spelled out for the library."""
    spelled = Tokenizer(fallback._library, eos_ids=[256])
    sentence = Grammars(spelled).regex("a( the|[.]|b)+").start()
    assert np.flatnonzero(sentence.allowed(())[0]).tolist() == [257]
    sentence.emit([257])
    assert (
        {258, 264, 265}
        <= set(np.flatnonzero(sentence.allowed(())[0]))
        <= {ord(c) for c in " .b"} | {258, 260, 264, 265}
    )
    pieces = Tokenizer(wordpiece._library, eos_ids=[0])
    assert pieces.token_text(2) == "b"
    sentence = Grammars(pieces).regex("b+ the").start()
    assert np.flatnonzero(sentence.allowed(())[0]).tolist() == [2]
    sentence.emit([2, 2])
    assert np.flatnonzero(sentence.allowed(())[0]).tolist() == [2, 3]
