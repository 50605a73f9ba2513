"""Images in the three APIs: each form becomes an `ImageSource` at its place among the texts, and what no model here
reads is refused by its place and its kind."""

from __future__ import annotations

from typing import Any

import pytest

from selfdraft.errors import InvalidRequest
from selfdraft.server.dialects import anthropic_messages, openai_chat, openai_responses
from selfdraft.server.dialects.wire import WireModel, read
from selfdraft.server.jobs import ChatJob, ImageSource

from .support import body

URL = "data:image/png;base64,AAAA"
FAR = "https://pictures.example/a.png"


def chat(*messages: dict[str, Any]) -> ChatJob:
    return openai_chat.to_job(made(openai_chat.ChatRequest, messages=list(messages)))


def responses(*items: dict[str, Any]) -> ChatJob:
    return openai_responses.to_job(made(openai_responses.ResponsesRequest, input=list(items)))


def anthropic(*messages: dict[str, Any], **fields: Any) -> ChatJob:
    request = made(anthropic_messages.MessagesRequest, messages=list(messages), max_tokens=5, **fields)
    return anthropic_messages.to_job(request)


def made(model: type[WireModel], **fields: Any) -> Any:
    return read(model, body({"model": "nano", **fields}))


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(value: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": value}


def image(url: str, where: str) -> dict[str, Any]:
    return {"type": "image", "image": ImageSource(url, where)}


def block(data: str = "AAAA", **fields: Any) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}, **fields}


def result(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": list(content), **fields}


# What is read


@pytest.mark.parametrize(
    "given",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL, "detail": "high"},
        block(),
    ],
)
def test_chat(given: dict[str, Any]) -> None:
    job = chat(user(text("before"), given, text("after"), text("wards")))
    place = "messages[0].content[1]"
    assert job.messages == [
        {"role": "user", "content": [text("before"), image(URL, place), text("afterwards")]},
    ]


def test_chat_keeps_the_order_of_several() -> None:
    first, second = ({"type": "image_url", "image_url": {"url": url}} for url in (URL, FAR))
    (message,) = chat(user(first, second, text("which?"), first)).messages
    places = [f"messages[0].content[{n}]" for n in range(4)]
    assert message["content"] == [image(URL, places[0]), image(FAR, places[1]), text("which?"), image(URL, places[3])]


def test_chat_takes_them_in_results_of_tools() -> None:
    called = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": "{}"}}]}
    shown = {"role": "tool", "tool_call_id": "c", "content": [text("seen:"), {"type": "image_url", "image_url": URL}]}
    job = chat(user(text("look")), called, shown)
    assert job.messages[-1]["content"] == [text("seen:"), image(URL, "messages[2].content[1]")]


def test_responses() -> None:
    picture = {"type": "input_image", "image_url": URL, "detail": "auto"}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    job = responses(
        {"role": "user", "content": [text("a", "input_text"), text("b", "input_text"), picture]},
        call,
        {"type": "function_call_output", "call_id": "c", "output": [picture, text("c", "input_text")]},
    )
    assert [message["content"] for message in job.messages if message["role"] != "assistant"] == [
        [text("a\nb"), image(URL, "input[0].content[2]")],
        [image(URL, "input[2].output[0]"), text("c")],
    ]


def test_messages() -> None:
    far = {"type": "image", "source": {"type": "url", "url": FAR}}
    job = anthropic(user(text("a"), text("b"), block(cache_control={"type": "ephemeral"}), far, text("c")))
    place = "messages[0].content[{}]".format
    assert [message["content"] for message in job.messages] == [
        [text("a\nb"), image(URL, place(2)), image(FAR, place(3)), text("c")]
    ]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (result(text("a"), block()), [text("a"), image(URL, "messages[0].content[0].content[1]")]),
        (result(block()), [image(URL, "messages[0].content[0].content[0]")]),
        (
            result(text("a"), block(), is_error=True),
            [text("Error: a"), image(URL, "messages[0].content[0].content[1]")],
        ),
        (result(block(), is_error=True), [text("Error: "), image(URL, "messages[0].content[0].content[0]")]),
        (result(is_error=True), "Error: "),
    ],
)
def test_messages_take_them_in_results_of_tools(given: dict[str, Any], shown: Any) -> None:
    """A screenshot; and the question that comes behind it stays a message of its own."""
    job = anthropic(user(given, text("and?")))
    assert job.messages[0] == {"role": "tool", "tool_call_id": "t1", "content": shown}
    assert job.messages[1] == {"role": "user", "content": "and?"}


def test_messages_take_them_in_documents() -> None:
    document = {"type": "document", "title": "Plan", "source": {"type": "content", "content": [text("a"), block()]}}
    (message,) = anthropic(user(document)).messages
    assert message["content"] == [text("Plan\na"), image(URL, "messages[0].content[0].source.content[1]")]


def test_text_alone_stays_a_string() -> None:
    assert chat(user(text("a"), text("b"))).messages == [{"role": "user", "content": "ab"}]
    assert responses({"role": "user", "content": [text("a", "input_text")]}).messages[0]["content"] == "a"
    assert anthropic(user(text("a"), text("b"))).messages[0]["content"] == "a\nb"


def test_pixels_do_not_go_into_logs() -> None:
    assert URL not in repr(chat(user({"type": "image_url", "image_url": URL})))


# What is refused

READ = "what is read here is text and images: leave it out"
STANDS = "is an image, and images stand in messages of the user and in results of tools"


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, f"of type 'input_audio', and {READ}"),
        ({"type": "video_url", "video_url": {"url": FAR}}, f"of type 'video_url', and {READ}"),
        ({"type": "file", "file": {"file_id": "f"}}, f"of type 'file', and {READ}"),
        ({"type": "input_file", "file_id": "f"}, f"of type 'input_file', and {READ}"),
        ({"type": "document", "source": {"type": "base64", "data": ""}}, f"of type 'document', and {READ}"),
        ({"type": "image_url"}, 'must have an image_url such as {"url": "data:image/png;base64,..."}'),
        ({"type": "image_url", "image_url": {"url": 5}}, "must have an image_url"),
        ({"type": "image_url", "image_url": None}, "must have an image_url"),
        ({"type": "input_image", "image_url": 5}, "must have an image_url such as data:image/png"),
        ({"type": "input_image", "file_id": "file-1"}, "the stored file 'file-1', and this server stores none"),
        ({"type": "image"}, 'must have a source such as {"type": "base64"'),
        ({"type": "image", "source": {"type": "base64"}}, "must have a source"),
        ({"type": "image", "source": {"type": "file", "file_id": "file-2"}}, "the stored file 'file-2', and"),
    ],
)
@pytest.mark.parametrize("dialect", [chat, responses, anthropic])
def test_what_is_no_image(dialect: Any, part: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        dialect(user(text("look"), part))
    name = "input" if dialect is responses else "messages"
    assert str(refused.value).startswith(f"{name}[0].content[1] ")
    assert says in str(refused.value)
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("dialect", "role", "param"),
    [
        (chat, "system", "messages"),
        (chat, "developer", "messages"),
        (chat, "assistant", "messages"),
        (responses, "system", "input"),
        (responses, "developer", "input"),
        (responses, "assistant", "input"),
        (anthropic, "system", "messages"),
        (anthropic, "assistant", "messages"),
    ],
)
def test_where_no_image_may_stand(dialect: Any, role: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        dialect(user(text("hi")), {"role": role, "content": [text("a"), block()]})
    assert str(refused.value).startswith(f"{param}[1].content[1] {STANDS}")
    assert refused.value.param == param


def test_instructions_show_none() -> None:
    with pytest.raises(InvalidRequest, match=r"^system\[0\] is an image, and images stand") as refused:
        anthropic(user(text("hi")), system=[block()])
    assert refused.value.param == "system"
