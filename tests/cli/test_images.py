"""Images in the terminal: `run --image` and `/image` show them to a model here or to one behind a server, in that order
before the text; what cannot be shown is said before anything is lost."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import selfdraft.loading
from selfdraft import SamplingParams
from selfdraft.cli.conversation import Conversation, LocalConversation
from selfdraft.cli.remote import RemoteConversation
from selfdraft.cli.server_client import ServedModel, served_model
from selfdraft.cli.slash import obey
from selfdraft.errors import ImageTooLarge, InvalidRequest
from selfdraft.images import read_picture
from selfdraft.llm import LLM
from tests.server.conftest import Running, running
from tests.support.vision import write_sighted

from .conftest import Command

GREEDY = SamplingParams(temperature=0, max_tokens=6)
QUESTION = "What is this?"


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return selfdraft.loading.load(str(write_sighted(tmp_path_factory.mktemp("models") / "sighted")))


@pytest.fixture(scope="module")
def served(sighted: LLM) -> Iterator[Running]:
    with running(lambda: selfdraft.loading.load(str(sighted.checkpoint.folder))) as server:
        yield server


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a cat.png", tmp_path / "two.jpg"]
    for n, path in enumerate(paths):
        Image.fromarray(np.full((24, 40, 3), 90 * n, np.uint8)).save(path)
    return paths


def message(*files: Path) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image", "image": read_picture(file.read_bytes())} for file in files]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]


def say(conversation: Conversation, text: str) -> str:
    return "".join(conversation.answer(conversation.turn(text)))


# run --image


def test_run(sighted: LLM, files: list[Path], inside: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfdraft.loading, "load", lambda *args, **kwargs: sighted)
    flags = [flag for file in files for flag in ("--image", str(file))]
    ended = inside("run", "--json", "--temperature", "0", "--max-tokens", "6", *flags, QUESTION)
    assert (ended.code, ended.err) == (0, "")
    body = json.loads(ended.out)
    direct = sighted.generate(message(*files), GREEDY)
    assert body["text"] == direct.text
    assert body["usage"]["prompt_tokens"] == direct.usage.prompt_tokens
    assert body["usage"]["prompt_tokens"] > len(sighted.tokens(QUESTION)) + 4


def test_run_with_a_blind_model(inside: Command, files: list[Path]) -> None:
    ended = inside("run", "--image", str(files[0]), QUESTION)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "selfdraft: this model cannot read images: the checkpoint has no vision tower\n"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.png", None, "none.png cannot be read: No such file or directory"),
        ("page.svg", b"<svg/>", "page.svg: the image is of no format that is read here"),
        ("empty.png", b"", "empty.png: the image is empty"),
        (".", None, "cannot be read: Is a directory"),
        ("large.png", bytes(20 * 2**20 + 1), "large.png has over 20,971,520 bytes"),
    ],
)
def test_files_that_are_no_images(name: str, content: bytes | None, says: str, light: Command, tmp_path: Path) -> None:
    """Said before a model is loaded for nothing."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    ended = light("run", "--image", str(tmp_path / name), QUESTION)
    assert (ended.code, ended.out) == (1, "")
    assert says in ended.err


def test_a_raw_prompt_has_no_place_for_them(light: Command, files: list[Path]) -> None:
    ended = light("run", "--raw", "--image", str(files[0]), QUESTION)
    assert ended.code == 2
    assert "--image" in ended.err


# /image


@pytest.fixture(params=["here", "served"])
def conversation(request: pytest.FixtureRequest, sighted: LLM, served: Running) -> Conversation:
    if request.param == "here":
        return LocalConversation(sighted, GREEDY)
    return RemoteConversation(served.url, served_model(served.url), GREEDY)


def test_a_message_shows_what_was_attached(conversation: Conversation, sighted: LLM, files: list[Path]) -> None:
    """Once; it stays in the conversation."""
    assert obey(conversation, f"/image {files[0]}") == "the next message shows a cat.png"
    assert obey(conversation, f"/image '{files[1]}'") == "the next message shows a cat.png, two.jpg"
    direct = sighted.generate(message(*files), GREEDY)
    said = say(conversation, QUESTION)
    assert said
    assert direct.text.endswith(said)  # a server puts reasoning elsewhere
    assert conversation.length == direct.usage.prompt_tokens + len(direct.token_ids)
    assert obey(conversation, "/image") == "no image"
    turn = conversation.turn("And now?")
    assert [len(each["content"]) for each in turn.messages if isinstance(each["content"], list)] == [3]
    assert turn.messages[-1]["content"] == "And now?"


def test_images_are_taken_back(conversation: Conversation, files: list[Path]) -> None:
    for take_back in ("/image none", "/reset"):
        obey(conversation, f"/image {files[1]}")
        obey(conversation, take_back)
        assert conversation.turn("Hi").messages[-1]["content"] == "Hi"


def test_several_files_as_a_shell_writes_them(conversation: Conversation, files: list[Path]) -> None:
    line = " ".join(str(file).replace(" ", "\\ ") for file in files)  # as a terminal pastes what is dropped on it
    assert obey(conversation, f"/image {line}") == "the next message shows a cat.png, two.jpg"


def test_what_cannot_be_shown_is_not_attached(conversation: Conversation, tmp_path: Path) -> None:
    assert obey(conversation, f"/image {tmp_path}/none.png").endswith("No such file or directory; usage: /image FILE")
    assert "names no file (No closing quotation)" in obey(conversation, "/image 'a")
    assert conversation.images == []


def test_a_refused_image_can_be_taken_back(served: Running, tmp_path: Path) -> None:
    """A server looks at it only when it comes: the message was not added, and it is still attached."""
    conversation = RemoteConversation(served.url, served_model(served.url), GREEDY)
    (tmp_path / "odd.png").write_bytes(b"no image")
    obey(conversation, f"/image {tmp_path}/odd.png")
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\]: the image is of no format"):
        say(conversation, "Hi")
    assert conversation.messages == []
    assert obey(conversation, "/image") == "the next message shows odd.png"
    obey(conversation, "/image none")
    assert say(conversation, "Hi")


def test_a_server_is_sent_the_file_itself(served: Running, files: list[Path]) -> None:
    conversation = RemoteConversation(served.url, served_model(served.url), GREEDY)
    part = conversation.image_part(files[1])
    assert part == {
        "type": "image_url",
        "image_url": {"url": f"data:image/jpeg;base64,{base64.b64encode(files[1].read_bytes()).decode()}"},
    }


def test_blind_models_say_so(llm: LLM, files: list[Path]) -> None:
    here = LocalConversation(llm, GREEDY)
    behind = RemoteConversation("http://127.0.0.1:1", ServedModel("nano", 100, 25, 8), GREEDY)
    for conversation in (here, behind):
        assert "reads text only" in obey(conversation, f"/image {files[0]}")
        assert conversation.images == []


def test_large_files_are_not_read_to_their_end(sighted: LLM) -> None:
    with pytest.raises(ImageTooLarge, match="/dev/zero has over"):
        LocalConversation(sighted, GREEDY).attach(Path("/dev/zero"))
