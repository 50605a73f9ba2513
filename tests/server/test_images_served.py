"""Images over HTTP, with a model that sees: what the official clients send arrives as pixels, counts as tokens, and is
answered; and a model that reads text says that it does."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from PIL import Image

import selfdraft
from selfdraft.images import Picture, read_picture
from selfdraft.llm import LLM
from selfdraft.server.pictures import Pictures
from tests.support.vision import write_sighted

from .conftest import Running, running, within

KEY = "none"


@pytest.fixture(scope="module")
def load_sighted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], LLM]:
    folder = write_sighted(tmp_path_factory.mktemp("models") / "sighted")
    return lambda: selfdraft.load(str(folder))


@pytest.fixture(scope="module")
def sighted(load_sighted: Callable[[], LLM]) -> Iterator[Running]:
    with running(load_sighted) as server:
        yield server


@pytest.fixture
def seen(sighted: Running, monkeypatch: pytest.MonkeyPatch) -> list[Picture]:
    """The pictures that prompts are made of, as they come."""
    found: list[Picture] = []
    prompts = sighted.service.llm.prompts
    chat = prompts.chat

    def watched(messages: Any, **arguments: Any) -> Any:
        contents = [message["content"] for message in messages if isinstance(message["content"], list)]
        found.extend(part["image"] for content in contents for part in content if part["type"] == "image")
        return chat(messages, **arguments)

    monkeypatch.setattr(prompts, "chat", watched)
    return found


def png(shade: int = 0, width: int = 40, height: int = 24) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 80, 200)).save(out, "PNG")
    return out.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{encoded(data)}"


def openai_client(server: Running) -> openai.OpenAI:
    client = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(api_key=KEY, base_url=f"{server.url}/v1", http_client=client, max_retries=0)


def anthropic_client(server: Running) -> anthropic.Anthropic:
    client = anthropic.DefaultHttpxClient(trust_env=False)
    return anthropic.Anthropic(api_key=KEY, base_url=server.url, http_client=client, max_retries=0)


def chat_messages(*files: bytes) -> list[Any]:
    images = [{"type": "image_url", "image_url": {"url": url(file), "detail": "high"}} for file in files]
    return [{"role": "user", "content": [{"type": "text", "text": "What is "}, *images]}]


def test_chat(sighted: Running, seen: list[Picture]) -> None:
    """Depth changes nothing of a greedy answer, a stream says the same, and the second time it is warm."""
    files = [png(1), png(2, 64, 64)]
    asked: dict[str, Any] = {"model": "nano", "messages": chat_messages(*files), "max_tokens": 12, "temperature": 0}
    with openai_client(sighted) as client:
        drafted = client.chat.completions.create(**asked)
        plain = client.chat.completions.create(**asked, extra_body={"depth": 0, "cache_prompt": False})
        chunks = list(client.chat.completions.create(**asked, stream=True))
    said = drafted.choices[0].message.content
    assert said
    assert plain.choices[0].message.content == said
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
    assert seen == [read_picture(file) for file in files] * 3


def test_responses(sighted: Running, seen: list[Picture]) -> None:
    picture = {"type": "input_image", "image_url": url(png(3)), "detail": "auto"}
    asked: Any = [{"role": "user", "content": [picture, {"type": "input_text", "text": "What?"}]}]
    with openai_client(sighted) as client:
        response = client.responses.create(model="nano", input=asked, max_output_tokens=8, temperature=0)
    assert response.usage is not None
    assert response.usage.output_tokens > 0
    assert seen == [read_picture(png(3))]


def test_messages_and_how_many_tokens_they_have(sighted: Running, seen: list[Picture]) -> None:
    """An image counts by its size, as far as the model looks at it."""
    small, large = png(4, 24, 24), png(4, 96, 64)

    def message(*files: bytes) -> Any:
        source = [{"type": "base64", "media_type": "image/png", "data": encoded(file)} for file in files]
        blocks = [{"type": "image", "source": each} for each in source]
        return [{"role": "user", "content": [{"type": "text", "text": "hi"}, *blocks]}]

    with anthropic_client(sighted) as client:
        counts = [
            client.messages.count_tokens(model="nano", messages=message(*files)).input_tokens
            for files in ([], [small], [large], [small, large])
        ]
        answer = client.messages.create(model="nano", max_tokens=6, messages=message(small, large))
    text, with_small, with_large, with_both = counts
    assert text < with_small < with_large
    assert with_both - text == (with_small - text) + (with_large - text)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == with_both
    assert seen[-2:] == [read_picture(small), read_picture(large)]


def test_tokens_of_a_chat(sighted: Running) -> None:
    with sighted.client() as http:
        with_image, without = (
            http.post("/tokenize", json={"messages": messages}).json()
            for messages in (chat_messages(png()), [{"role": "user", "content": "What is "}])
        )
    assert with_image["count"] > without["count"] + 2


def test_models_say_what_they_read(sighted: Running, server: Running) -> None:
    for which, modalities in ((sighted, ["text", "image"]), (server, ["text"])):
        with which.client() as http:
            (model,) = http.get("/v1/models").json()["data"]
        assert model["architecture"] == {"input_modalities": modalities, "output_modalities": ["text"]}
        assert model["capabilities"] == {"image_input": {"supported": len(modalities) == 2}}
    with anthropic_client(sighted) as client:
        (found,) = client.models.list()
        assert found.capabilities is not None
        assert found.capabilities.image_input.supported


def test_a_model_that_reads_text_says_so(server: Running) -> None:
    says = "is an image, and this model reads text only"
    with openai_client(server) as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="nano", messages=chat_messages(png()))
    assert f"messages[0].content[1] {says}" in str(refused.value)
    source: Any = {"type": "base64", "media_type": "image/png", "data": encoded(png())}
    messages: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with anthropic_client(server) as client:
        with pytest.raises(anthropic.BadRequestError, match="reads text only"):
            client.messages.create(model="nano", max_tokens=5, messages=messages)
        with pytest.raises(anthropic.BadRequestError, match="reads text only"):
            client.messages.count_tokens(model="nano", messages=messages)


def test_what_is_wrong_is_said_in_each_clients_form(sighted: Running) -> None:
    with openai_client(sighted) as client:
        with pytest.raises(
            openai.BadRequestError, match=r"messages\[0\].content\[1\]: the image is damaged"
        ) as refused:
            client.chat.completions.create(model="nano", messages=chat_messages(png()[:44]))
        assert (refused.value.param, refused.value.code) == ("messages", "invalid_request")
        with pytest.raises(openai.APIStatusError, match="holds 65 images; at most 64 are accepted") as many:
            client.chat.completions.create(model="nano", messages=chat_messages(*[png()] * 65))
        assert many.value.status_code == 413
    far: Any = {"type": "image", "source": {"type": "url", "url": "http://pictures.example/a.png"}}
    with (
        anthropic_client(sighted) as reader,
        pytest.raises(anthropic.BadRequestError, match="this server fetches none: send") as elsewhere,
    ):
        reader.messages.create(model="nano", max_tokens=5, messages=[{"role": "user", "content": [far]}])
    assert elsewhere.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


def test_remote_images_stay_off_the_network_inside(load_sighted: Callable[[], LLM]) -> None:
    """Allowed, an address of this machine is still not asked: not even that of the server itself."""
    with running(load_sighted, remote_images=True) as server, server.client() as http:
        for host in ("127.0.0.1", "localhost", "[::1]"):
            image = {"type": "image_url", "image_url": {"url": f"http://{host}/page/icon.svg"}}
            body = {"model": "nano", "messages": [{"role": "user", "content": [image]}]}
            refused = http.post("/v1/chat/completions", json=body)
            assert refused.status_code == 400
            assert "is not a public one" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_images_are_not_read_for_whoever_is_gone(sighted: Running, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, given_up = threading.Event(), threading.Event()

    async def slow(self: Pictures, job: Any, *, blind: str) -> Any:
        begun.set()
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            given_up.set()
            raise

    monkeypatch.setattr(Pictures, "read", slow)
    body = json.dumps({"model": "nano", "messages": chat_messages(png())}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", sighted.port)) as client:
        client.sendall(head.encode() + body)
        assert begun.wait(10)
    assert given_up.wait(5)


def test_images_of_answers_that_are_over_are_held_by_nobody(sighted: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the bound on what all requests hold would be reached for good. No collector is needed for it."""
    held: list[weakref.ref[Picture]] = []
    read = Pictures.read

    async def watched(self: Pictures, job: Any, *, blind: str) -> Any:
        done = await read(self, job, blind=blind)
        held.extend(weakref.ref(part["image"]) for part in done.messages[0]["content"] if part["type"] == "image")
        return done

    monkeypatch.setattr(Pictures, "read", watched)
    gc.disable()
    try:
        with sighted.client() as http:
            for more in ({}, {"n": 2}, {"depth": 0}):
                body = {"model": "nano", "messages": chat_messages(png(len(held))), "max_tokens": 4, **more}
                http.post("/v1/chat/completions", json=body).raise_for_status()
            with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True, "max_tokens": 400}) as left:
                next(left.iter_lines())
        assert sighted.idle()
        assert len(held) >= 4
        assert within(5, lambda: not any(each() for each in held))
    finally:
        gc.enable()


def test_a_chat_page_is_told(sighted: Running, tmp_path: Path) -> None:
    """What the page asks is what the server says (see test_page_images)."""
    with sighted.client() as http:
        assert "input_modalities" in http.get("/page/app.js").text
        assert "image" in http.get("/v1/models").json()["data"][0]["architecture"]["input_modalities"]
        assert "img-src 'self' data:;" in http.get("/").headers["content-security-policy"]
