"""Guards structured output end to end: the reference model, a JSON schema, drafts on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from selfdraft.engine import Engine, Request, Row, noise
from selfdraft.source import REFERENCE, find_model
from selfdraft.text import ChatTemplate, Tokenizer
from selfdraft.text.grammar import Grammar, Grammars
from tests.support.reference import reference_model
from tests.support.rows import finish, params

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "animal": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
        "wings": {"type": "boolean"},
    },
    "required": ["animal", "legs", "wings"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model() -> Any:
    return reference_model()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(find_model(REFERENCE))


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    template = ChatTemplate.from_folder(find_model(REFERENCE))
    assert template is not None
    asked = [{"role": "user", "content": "Describe a horse as JSON."}]
    return tokenizer.encode(template.render(asked, enable_thinking=False), special=True)


def decode(model: Any, tokenizer: Tokenizer, prompt: list[int], grammar: Grammar, **given: Any) -> list[Row]:
    """The same request at depth 0 and at depth 3, side by side."""
    engine = Engine(model)
    rows = [
        engine.add(
            Request(
                prompt,
                params(depth=depth, max_tokens=56, **given),
                stop_ids=tokenizer.eos_ids,
                constraint=grammar.start(),
            )
        )
        for depth in (0, 3)
    ]
    for number, row in enumerate(rows):
        if not row.coupled:
            row.stream = noise.stream(number, 0)  # in place of the system's randomness: no run differs from another
    finish(engine)
    return rows


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": 1.0}])
def test_a_schema_holds_and_drafts_are_kept(
    model: Any, tokenizer: Tokenizer, prompt: list[int], given: dict[str, Any]
) -> None:
    rows = decode(model, tokenizer, prompt, Grammars(tokenizer).json_schema(SCHEMA), **given)
    for row in rows:
        assert row.finish_reason == "stop"
        found = json.loads(tokenizer.decode(row.emitted))
        assert list(found) == ["animal", "legs", "wings"]
        assert isinstance(found["animal"], str)
        assert type(found["legs"]) is int
        assert 0 <= found["legs"] <= 99
        assert isinstance(found["wings"], bool)
    plain, drafted = rows
    if rows[0].coupled:
        assert drafted.emitted == plain.emitted
    assert plain.statistics.timings().tokens_per_cycle == 1
    assert drafted.statistics.timings().tokens_per_cycle > 1


def test_thinking_is_free_and_the_answer_is_not(model: Any, tokenizer: Tokenizer, prompt: list[int]) -> None:
    """The bias closes the thought after a few tokens; at every depth the same."""
    marker = tokenizer.token_id("</think>")
    assert marker is not None
    grammar = Grammars(tokenizer).json_schema(SCHEMA).after("</think>")
    rows = decode(model, tokenizer, prompt, grammar, temperature=1.0, seed=6, logit_bias={marker: 18.0})
    for row in rows:
        thought = row.emitted.index(marker)
        assert thought > 0
        assert set(json.loads(tokenizer.decode(row.emitted[thought + 1 :]))) == set(SCHEMA["properties"])
    assert rows[0].emitted == rows[1].emitted
