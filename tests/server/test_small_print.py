"""Guards what clients rely on beside text and calls: bytes of tokens, counts of reasoning, old forms, one rendering."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from selfdraft.results import Generation, Piece, Usage
from selfdraft.server import chat as chat_module
from selfdraft.server.chat import _ChatWriter
from selfdraft.server.jobs import Finished
from selfdraft.text import RowText, Tokenizer
from selfdraft.text.reply import ReplyParser

from .conftest import Running
from .dialects.support import TIMINGS
from .test_server import chat, streamed
from .test_tools import HI, NOTE, TOOLS, WEATHER, said

SMILE = "é🙂"


def saying(text: str) -> dict[str, Any]:
    """Members of a request whose answer says a text."""
    return {"response_format": {"type": "grammar", "grammar": f"start: {json.dumps(text)}"}, "max_tokens": 200}


# --- tokens that are part of a character


def check_bytes(tokens: list[dict[str, Any]]) -> None:
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode().startswith(SMILE)
    parts = [token for token in tokens if token["token"].startswith("bytes:")]
    assert len(parts) > 2
    for part in parts:
        assert part["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in part["bytes"])


def test_the_bytes_of_a_chats_tokens_are_its_text(server: Running) -> None:
    given = {"logprobs": True, "top_logprobs": 3, **saying(SMILE), "ignore_eos": False}
    with server.client() as client:
        (choice,) = chat(client, **given)["choices"]
        chunks = streamed(client, **given)
    check_bytes(choice["logprobs"]["content"])
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"]]
    assert [token for entry in told if entry for token in entry["content"]] == choice["logprobs"]["content"]
    for token in choice["logprobs"]["content"]:
        for other in token["top_logprobs"]:
            assert other["token"].startswith("bytes:") or other["token"] == bytes(other["bytes"]).decode()


def test_completions_tell_parts_of_characters_apart(server: Running) -> None:
    asked = {"model": "nano", "prompt": "x", "logprobs": 1, "temperature": 0, **saying(SMILE)}
    with server.client() as client:
        (whole,) = client.post("/v1/completions", json=asked).json()["choices"]
        text = client.post("/v1/completions", json={**asked, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    tokens = [token for chunk in chunks for token in (chunk["choices"][0]["logprobs"] or {}).get("tokens", ())]
    assert tokens == whole["logprobs"]["tokens"]
    spelled = "".join(token.removeprefix("bytes:") for token in tokens if token.startswith("bytes:"))
    assert spelled.count("\\x") > 2
    assert bytes.fromhex(spelled.replace("\\x", "")).decode() in SMILE


# --- tokens of reasoning


def written(tokenizer: Tokenizer, ids: list[int], *, in_reasoning: bool) -> Finished:
    """The end of an answer of these tokens."""
    writer = _ChatWriter(0, ReplyParser(None, (), in_reasoning=in_reasoning), single=False)
    writer.text = RowText(tokenizer)
    writer.text.push(ids)
    result = Generation(writer.text.text, ids, "stop", Usage(1, len(ids)), TIMINGS)
    writer.events(Piece(writer.text.take(), ids))
    *_, last = writer.events(Piece(writer.text.finish(), result=result))
    assert isinstance(last, Finished)
    return last


def test_reasoning_tokens_are_those_that_were_generated(server: Running) -> None:
    """However the text would be spelled anew; the markers are none of them."""
    tokenizer = server.service.llm.tokenizer
    letters = [id for letter in "the weather" for id in tokenizer.encode(letter, special=False)]
    think, end = (tokenizer.encode(marker, special=True) for marker in ("<think>", "</think>"))
    behind = tokenizer.encode("\n\nRain.", special=False)
    assert len(letters) == 11 > len(tokenizer.encode("the weather", special=False))
    for ids, in_reasoning, expected in [
        ([*think, *letters, *end, *behind], False, 11),
        ([*letters, *end, *behind], True, 11),
        ([*letters, *end, *think, *letters, *end, *behind], True, 22),
        ([*letters, *end], True, 11),
        ([*letters, min(tokenizer.eos_ids)], True, 12),  # never ended: all of it
        ([*end, *behind], True, 0),
        (behind, False, 0),
    ]:
        assert written(tokenizer, ids, in_reasoning=in_reasoning).reasoning_tokens == expected


def test_a_token_across_a_border_belongs_to_the_side_on_which_it_begins(server: Running) -> None:
    tokenizer = server.service.llm.tokenizer
    pieces = ["<think>\n\nHe said", " <", "/think>\n\nAnd so"]
    ids = [id for piece in pieces for id in tokenizer.encode(piece, special=False)]  # the markers spelled out
    texts = [tokenizer.token_text(id) for id in ids]
    begins = [len("".join(texts[:n])) for n in range(len(ids))]
    borders = (len("<think>"), "".join(pieces).index("</think>"))
    for border in borders:
        assert any(begin < border < begin + len(text) for begin, text in zip(begins, texts, strict=True)), texts
    finished = written(tokenizer, ids, in_reasoning=False)
    assert finished.reasoning_tokens == sum(borders[0] <= begin < borders[1] for begin in begins)


# --- one reading of an answer


@pytest.mark.parametrize("single", [False, True])
def test_an_answer_is_parsed_once(server: Running, monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    read: list[str] = []

    class Counting(ReplyParser):
        def push(self, text: str) -> Any:
            read.append(text)
            return super().push(text)

    monkeypatch.setattr(chat_module, "ReplyParser", Counting)
    said(server, "chat", f"Look: {WEATHER}\n{NOTE}", single=single, depth=2)
    assert "".join(read).rstrip() == (f"Look: {WEATHER}" if single else f"Look: {WEATHER}\n{NOTE}")


# --- calls in the old form


def test_functions_are_answered_in_the_old_form(server: Running) -> None:
    given = {"functions": [tool["function"] for tool in TOOLS], **saying(f"Look: {WEATHER}\n{NOTE}")}
    with server.client() as client:
        (choice,) = chat(client, **given)["choices"]
        chunks = [chunk["choices"][0] for chunk in streamed(client, **given)]
    call = choice["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Bonn", "days": 3})
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "function_call"
    pieces = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert pieces[0] == {"name": "weather", "arguments": ""}
    assert "".join(piece["arguments"] for piece in pieces) == call["arguments"]
    assert not any("tool_calls" in chunk["delta"] for chunk in chunks)


# --- one way from messages to a prompt


def test_messages_are_tokenized_as_a_chat_is(server: Running) -> None:
    past = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    given: dict[str, Any] = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            *HI,
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [past]},
            {"role": "tool", "tool_call_id": "c", "content": "rain"},
            {"role": "developer", "content": "And kind."},
        ],
        "tools": TOOLS,
        "enable_thinking": True,
    }
    with server.client() as client:
        for fields in (given, {**given, "tool_choice": "none"}, {**given, "enable_thinking": False}, {"messages": HI}):
            found = client.post("/tokenize", json=fields).json()
            usage = chat(client, **{**fields, "max_tokens": 1})["usage"]
            assert found["count"] == len(found["tokens"]) == usage["prompt_tokens"]
        text = client.post("/detokenize", json={"tokens": client.post("/tokenize", json=given).json()["tokens"]}).json()
        assert "Be brief." in text["prompt"]
        assert "And kind." in text["prompt"]
        assert '"name": "weather"' in text["prompt"]
        for wrong, status, param in [
            ({"messages": HI * 3000}, 413, "messages"),
            ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages"),
            ({"messages": HI, "prompt": "x"}, 400, "prompt"),
            ({"messages": []}, 400, "prompt"),
        ]:
            refused = client.post("/tokenize", json=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


# --- models


def test_models_speak_to_each_client_in_its_own_form(server: Running) -> None:
    with server.client() as http:
        own = {"anthropic-version": "2023-06-01"}
        for path in ("/v1/models/other", "/v1/models/"):
            refused = http.get(path, headers=own)
            assert (refused.status_code, refused.json()["type"]) == (404, "error")
            assert refused.json()["error"]["type"] == "not_found_error"
            assert http.get(path).json()["error"]["code"] == "model_not_found"
        assert http.post("/v1/models", headers=own).json()["error"]["type"] == "invalid_request_error"
        assert http.get("/v1/models", headers={**own, "host": "evil.example"}).json()["type"] == "error"  # the gate
    http_client = anthropic.DefaultHttpxClient(trust_env=False)
    with anthropic.Anthropic(api_key="none", base_url=server.url, http_client=http_client, max_retries=0) as client:
        (model,) = client.models.list(limit=5)
        assert (model.id, model.type, model.display_name) == ("nano", "model", "nano")
        assert model.created_at.tzinfo is not None
        assert client.models.retrieve("nano") == model
        with pytest.raises(anthropic.NotFoundError, match="no model 'other' here"):
            client.models.retrieve("other")
    theirs = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(api_key="none", base_url=f"{server.url}/v1", http_client=theirs, max_retries=0) as reader:
        assert [model.id for model in reader.models.list()] == ["nano"]
        with pytest.raises(openai.NotFoundError, match="no model 'other' here"):
            reader.models.retrieve("other")
