"""Guards `selfdraft start`: what it asks and remembers, what it starts, and that it uses a server that runs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pexpect
import pytest
from huggingface_hub import constants

import selfdraft
from selfdraft.cli import places
from selfdraft.cli import start as starting
from selfdraft.cli.chat import GREETING
from selfdraft.cli.found_models import find_models
from selfdraft.cli.remote import RemoteConversation
from selfdraft.cli.serve import LogFlags
from selfdraft.cli.server_client import KeyNeeded, ServedModel, Unreachable, health, served_model
from selfdraft.cli.slash import obey
from selfdraft.cli.wizard import StartSettings
from selfdraft.errors import ContextOverflow, InvalidRequest
from selfdraft.llm import LLM
from selfdraft.params import SamplingParams
from selfdraft.server import instance as instances
from selfdraft.server import served
from selfdraft.server.config import load_server_settings
from selfdraft.server.instance import noted
from selfdraft.server.registry import Given
from selfdraft.settings import load_settings
from selfdraft.source import REFERENCE
from tests.server.conftest import Running, running, within
from tests.support.checkpoints import add_text_side
from tests.support.nano import nano_model, write_checkpoint

from .conftest import COMMAND, Command, Ended

forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@pytest.fixture(scope="module")
def nano_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = nano_model(vocab_size=8192, sharpness=3.0)
    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "nano", model, config={"vocab_size": 8192})
    return add_text_side(folder)


@pytest.fixture(scope="module")
def load_nano(nano_folder: Path) -> Callable[[], LLM]:
    return lambda: selfdraft.load(str(nano_folder))


@pytest.fixture(scope="module")
def server(load_nano: Callable[[], LLM]) -> Iterator[Running]:
    with running(load_nano) as found:
        yield found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has nothing yet, in this process and in those it starts."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SELFDRAFT_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")
    monkeypatch.setenv("TERM", "xterm")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(instances, "_path", lambda: tmp_path / "state" / "selfdraft" / "server.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def terminal(*arguments: str) -> Any:
    """`selfdraft start` in a terminal of 80 columns."""
    command = [*COMMAND[1:], "start", *arguments]
    return pexpect.spawn(COMMAND[0], command, encoding="utf-8", timeout=180, dimensions=(40, 80))


def settled(child: Any) -> int:
    child.expect(pexpect.EOF)
    child.close()
    return int(child.exitstatus)


# In a pipe


def test_a_pipe_is_a_chat_and_asks_nothing(home: Path, inside: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_params", lambda choice: SamplingParams(temperature=0))
    started = inside("start", stdin=b"What is 2 + 2?\n")
    assert started == inside("chat", "--temperature", "0", stdin=b"What is 2 + 2?\n")
    assert started.code == 0
    assert started.out
    assert not (home / "config").exists()


def test_without_any_input_it_answers_a_greeting(home: Path, inside: Command) -> None:
    ended = inside("start")
    assert ended.out
    assert ended.err == f"selfdraft: no input: answering {GREETING!r}\n"


def test_a_pipe_takes_what_was_chosen_but_no_browser(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "config").mkdir()
    stored = home / "config/settings.toml"
    stored.write_text('[start]\nmodel = "/m"\ndrafting = "off"\nsurface = "browser"\n')
    nothing = {"model": None, "drafting": None, "surface": None}
    settings = load_server_settings()
    choice = starting._choice(nothing, settings, setup=False)
    assert choice == StartSettings(model="/m", drafting="off", surface="terminal")
    monkeypatch.setenv("SELFDRAFT_START_MODEL", "/env")
    flags = {"model": None, "drafting": "auto", "surface": "browser"}
    choice = starting._choice(flags, settings, setup=False)
    assert choice == StartSettings(model="/env", drafting="auto", surface="browser")
    stored.write_text('[start]\nsurface = "window"\n')
    with pytest.raises(InvalidRequest, match="'window'") as refused:
        starting._choice(nothing, settings, setup=False)
    assert str(stored) in str(refused.value)


def test_drafting_off_is_plain_decoding(home: Path) -> None:
    assert starting._params(StartSettings(drafting="off")).depth == 0
    assert starting._params(StartSettings(drafting="auto")).depth == "auto"


# Models on this machine


def test_models_are_found_classified_and_measured(home: Path, nano_folder: Path, monkeypatch: Any) -> None:
    shutil.copytree(nano_folder, home / "models/one")
    shutil.copytree(nano_folder, home / "models/owner/two")
    broken = home / "models/broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama"}')
    (broken / "model.safetensors").write_bytes(b"")
    (home / "models/no-model").mkdir()
    (home / "models/no-model/config.json").write_text("{}")
    _cache(home / "hub", "models--owner--cached", nano_folder, main=True)
    _cache(home / "hub", "models--owner--pinned", nano_folder, main=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(places, "_disks", lambda: [])
    found = {each.name: each for each in find_models(load_settings())}
    one = str(home / "models/one")
    assert list(found) == [
        REFERENCE,
        str(broken),
        one,
        str(home / "models/owner/two"),
        "owner/cached",
        f"owner/pinned@{'a' * 40}",
    ]
    assert "'llama' is not supported" in found[str(broken)].problem
    assert not found[REFERENCE].head
    assert found[one].disk == sum(path.stat().st_size for path in (home / "models/one").iterdir())
    weights = (home / "models/one/model.safetensors").stat().st_size
    assert found[one].memory == pytest.approx(1.1 * weights + 512e6, rel=0.01)


def _cache(hub: Path, name: str, folder: Path, *, main: bool) -> None:
    """A repository in the layout of the Hugging Face cache; beside its main revision lies a newer one."""
    commit = "a" * 40
    shutil.copytree(folder, hub / name / "snapshots" / commit)
    if main:
        newer = shutil.copytree(folder, hub / name / "snapshots" / ("b" * 40))
        for path in newer.iterdir():
            os.utime(path, (2e9, 2e9))
    (hub / name / "refs").mkdir()
    (hub / name / "blobs").mkdir()
    (hub / name / "refs" / ("main" if main else "v1")).write_text(commit)


def test_memory_follows_the_dtype(home: Path) -> None:
    (stored,) = find_models(load_settings(dtype="bfloat16"), places=())[:1]
    (double,) = find_models(load_settings(dtype="float32"), places=())[:1]
    assert double.memory - 512e6 == pytest.approx(2 * (stored.memory - 512e6), rel=0.02)


# In a terminal


@forks
def test_it_asks_once_and_then_one_key_starts_the_same(home: Path, nano_folder: Path) -> None:
    shutil.copytree(nano_folder, home / "models/nano")
    child = terminal()
    child.expect("Which model")
    child.expect("1  reference")
    child.expect(r"MB on disk · MTP head · fits: needs \d+ MB of [\d.]+ [GM]B free")
    child.expect("2  ~/models/nano")
    child.expect(r"\[1\]: ")
    child.send("7\r")
    child.expect("7 is not on the list; choose 1 to 2")
    child.send("nowhere\r")
    child.expect("no model 'nowhere'")
    child.send("2\r")
    child.expect("How should it decode")
    child.expect(r"drafting \[1\]: ")
    child.send("2\r")
    child.expect("Where do you want")
    child.expect(r"where \[1\]: ")
    child.send("\r")
    child.expect("remembered in ")
    child.expect("nano · depth 0")
    child.expect(">")
    child.sendeof()
    assert settled(child) == 0
    stored = home / "config/settings.toml"
    assert stored.read_text().endswith(
        f'[start]\nmodel = "{home}/models/nano"\ndrafting = "off"\nsurface = "terminal"\n'
    )

    child = terminal()
    child.expect("Enter starts it, s sets up anew, q leaves")
    child.send("\r")
    child.expect("nano · depth 0")
    child.expect(">")
    child.sendeof()
    assert settled(child) == 0


@forks
def test_other_keys_leave_or_ask_again(home: Path) -> None:
    (home / "config").mkdir()
    stored = home / "config/settings.toml"
    stored.write_text('[start]\nmodel = "reference"\n')
    child = terminal()
    child.expect("reference, in the terminal · Enter starts it, s sets up anew, q leaves")
    child.send("q")
    assert settled(child) == 0
    child = terminal()
    child.expect("q leaves")
    child.send("s")
    child.expect(r"\[1\]: ")
    child.sendeof()  # thought better of it
    assert settled(child) == 0
    assert stored.read_text() == '[start]\nmodel = "reference"\n'


# In a browser


@forks
def test_a_browser_opens_when_the_model_is_there(
    home: Path, nano_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = home / "opened"
    browser = home / "browser"
    browser.write_text(f'#!/bin/sh\nprintf "%s" "$1" > {opened}.new\nmv {opened}.new {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    command = [*COMMAND, "start", "--browser", "--port", "0", "--model", str(nano_folder), "--drafting", "off"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert within(60, opened.exists)
        url = opened.read_text()
        assert health(url)["status"] == "ok"
        assert served_model(url).max_depth == 0
        asked = {"model": "x", "prompt": "Hi", "max_tokens": 5, "ignore_eos": True, "depth": "auto"}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60, trust_env=False).json()
        assert answer["timings"]["drafts_tried"] == []
        again = subprocess.run(
            [*COMMAND, "start", "--browser", "--model", str(nano_folder)], capture_output=True, text=True, timeout=60
        )
        assert again.returncode == 0
        assert f"runs already at {url}: no second one is started" in again.stderr
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=20)
        assert process.returncode == 130
        assert f"ready: {url} opens in your browser" in shown
        assert "Traceback" not in shown
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_something_else_has(home: Path, light: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogFlags, "apply", lambda flags: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = light("start", "--browser", "--port", str(port))
    assert ended.code == 1
    assert f"port {port} on 127.0.0.1 is in use" in ended.err
    assert "choose another with --port" in ended.err
    assert not (home / "state").exists()  # nothing is noted of a server that is not there


def test_an_adapter_is_for_the_model_that_is_started(
    home: Path, light: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for those that settings serve beside it, which it would change as they are loaded."""
    monkeypatch.setattr(LogFlags, "apply", lambda flags: None)
    monkeypatch.setenv("SELFDRAFT_MODELS", "small=reference")
    ended = light("start", "--browser", "--port", "0", "--adapter-path", str(home))
    assert ended.code == 1
    assert f"the adapter {home} is for one model, and 2 are given" in ended.err


def test_a_model_that_cannot_be_loaded_ends_the_server(home: Path) -> None:
    empty = home / "empty"
    empty.mkdir()
    command = [*COMMAND, "start", "--browser", "--port", "0", "--model", str(empty)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"selfdraft: {empty}: no config.json there; a model folder has one"
    assert "Traceback" not in done.stderr


# A server that runs already


def test_a_running_server_is_used(
    home: Path, server: Running, light: Command, nano_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "_params", lambda choice: SamplingParams(max_tokens=8))
    with noted("127.0.0.1", server.port, str(nano_folder)):
        ended: Ended = light("start", "--model", str(nano_folder), stdin=b"Hi\n/depth\n/depth 1\nHi again\n/stats\n")
    assert ended.code == 0
    assert f"runs already at {server.url}: no second one is started" in ended.err
    assert "depth auto (up to 8)" in ended.err
    assert "depth 1\n" in ended.err
    assert re.search(r"acceptance   \d+ %", ended.err)  # one position: the depth was obeyed
    assert ended.out


def test_another_model_than_the_one_that_runs_is_said(home: Path, light: Command, nano_folder: Path) -> None:
    with noted("127.0.0.1", 1, "owner/other"):
        ended = light("start", "--model", str(nano_folder), stdin=b"Hi\n")
    assert (ended.code, ended.out) == (1, "")
    assert f"with owner/other and not {nano_folder}: `selfdraft stop` ends it" in ended.err
    assert "`selfdraft start --model owner/other` talks with it" in ended.err


def test_a_further_model_of_the_one_that_runs_is_talked_with(home: Path, light: Command, nano_folder: Path) -> None:
    """By its name there, and loaded for it."""
    models = [
        served.ServedModel(Given(name, name), lambda: 0, lambda beside: LLM.open("nano", nano_folder, load_settings()))
        for name in ("first", "further")
    ]
    with running(*models) as server, noted("127.0.0.1", server.port, "owner/first"):
        ended = light("start", "--model", "further", stdin=b"/quit\n")
        assert (ended.code, server.models.pool.state("further")) == (0, "loaded")
        assert f"a server with further runs already at {server.url}" in ended.err
        assert light("start", "--model", str(nano_folder), stdin=b"/quit\n").code == 1


def test_a_folder_is_the_same_however_it_is_written(
    home: Path, server: Running, light: Command, nano_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(nano_folder.parent)
    with noted("127.0.0.1", server.port, str(nano_folder)):
        assert light("start", "--model", "./nano", stdin=b"/quit\n").code == 0


def test_a_server_that_does_not_answer_is_said(home: Path, light: Command) -> None:
    with noted("127.0.0.1", 1, REFERENCE):
        ended = light("start", stdin=b"Hi\n")
    assert ended.code == 1
    assert "cannot be used (nothing answers there): `selfdraft stop`, then start again" in ended.err


# A conversation over HTTP


def remote(server: Running, **params: Any) -> RemoteConversation:
    return RemoteConversation(server.url, served_model(server.url), SamplingParams(temperature=0, **params))


def say(conversation: RemoteConversation, text: str, stopped: Callable[[], bool] = lambda: False) -> str:
    return "".join(conversation.answer(conversation.turn(text), stopped))


def test_a_remote_answer_is_the_servers(server: Running) -> None:
    conversation = remote(server, max_tokens=12)
    conversation.system = "Be brief."
    said = say(conversation, "Hi")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    asked = {"model": "x", "messages": messages, "temperature": 0, "max_tokens": 12, "enable_thinking": False}
    with server.client() as client:
        body = client.post("/v1/chat/completions", json=asked).json()
    assert said == body["choices"][0]["message"]["content"]
    assert conversation.last is not None
    assert conversation.last.tokens == body["usage"]["completion_tokens"]
    assert conversation.length == body["usage"]["total_tokens"]
    assert conversation.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}]
    assert [each["role"] for each in conversation.turn("And?").messages] == ["system", "user", "assistant", "user"]
    assert f"context        {conversation.length} of 4,096 tokens" in obey(conversation, "/stats")
    obey(conversation, "/reset")
    assert len(conversation.turn("Hi").messages) == 2


def test_a_remote_answer_can_be_stopped(server: Running) -> None:
    conversation = remote(server, max_tokens=2000, ignore_eos=True)
    shown: list[str] = []
    for piece in conversation.answer(conversation.turn("Hi"), lambda: bool(shown)):
        shown.append(piece)
    assert server.idle()
    assert conversation.finish == "cancelled"
    assert conversation.messages[-1] == {"role": "assistant", "content": "".join(shown)}
    assert conversation.last is not None
    assert 0 < conversation.last.tokens < 1000
    nothing = say(conversation, "Again", lambda: True)
    assert nothing == ""
    assert len(conversation.messages) == 2
    assert server.idle()


def test_a_server_that_is_silent_is_given_up_at_once() -> None:
    """As while it reads a long prompt: it must learn that nobody waits any more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        conversation = RemoteConversation(url, ServedModel("nano", 100, 25, 8), SamplingParams())
        looks: list[socket.socket] = []

        def stopped() -> bool:
            if not looks:
                connection, _ = listener.accept()
                connection.settimeout(2)
                looks.append(connection)
                return False
            return True

        assert say(conversation, "Hi", stopped) == ""
        assert conversation.messages == []
        with looks[0] as connection:
            received = b""
            while piece := connection.recv(65536):  # to the end: a timeout is an error
                received += piece
        assert b"POST /v1/chat/completions" in received


def test_what_a_server_refuses_keeps_its_kind(server: Running, load_nano: Callable[[], LLM]) -> None:
    with pytest.raises(ContextOverflow, match="4096"):
        say(remote(server), "word " * 5000)
    with pytest.raises(InvalidRequest, match="depth 9"):
        say(remote(server, depth=9), "Hi")
    with running(load_nano, api_key="sd-0123456789abcdef") as guarded:
        with pytest.raises(KeyNeeded, match="set SELFDRAFT_API_KEY"):
            served_model(guarded.url)
        model = served_model(guarded.url, "sd-0123456789abcdef")
        conversation = RemoteConversation(guarded.url, model, SamplingParams(max_tokens=3), key="wrong-key")
        with pytest.raises(KeyNeeded, match="another API key"):
            say(conversation, "Hi")
        conversation = RemoteConversation(guarded.url, model, SamplingParams(max_tokens=3), key="sd-0123456789abcdef")
        assert say(conversation, "Hi")
        url = guarded.url
    with pytest.raises(Unreachable, match="no server answers"):
        say(RemoteConversation(url, model, SamplingParams()), "Hi")
    assert health(url) == {"status": "unreachable"}


def test_reasoning_is_shown_before_its_tag(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [{"reasoning_content": "Hm"}, {"reasoning_content": "m."}, {"content": "Yes"}, {"content": "."}]
    ends: list[dict[str, Any]] = [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": []}]
    stream = [{"choices": [{"delta": each, "finish_reason": None}]} for each in chunks] + ends
    monkeypatch.setattr("selfdraft.cli.remote.chat_events", lambda *given: (each for each in stream))
    conversation = remote(server)
    turn = conversation.turn("Sure?")
    assert "".join(conversation.answer(turn)) == "Hmm.</think>\n\nYes."
    assert turn.reasoning
    assert conversation.messages[-1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hmm."}


@forks
def test_a_chat_with_a_running_server_in_a_terminal(home: Path, server: Running, nano_folder: Path) -> None:
    """Ctrl-C stops the answer, neither the chat nor the server."""
    with noted("127.0.0.1", server.port, str(nano_folder)):
        child = terminal("--model", str(nano_folder))
        child.expect(rf"nano at {server.url} · depth auto")
        child.expect(r"\[\?2004h.*>")
        child.send("Tell me a story.\r")
        child.expect(r"\[\?2004l.*\w+ \w+ ")  # text streams
        child.sendintr()
        child.expect(r"stopped, (\d+) tokens?, .*a cycle")
        assert 0 < int(child.match.group(1)) < 1000
        child.expect(r"\[\?2004h.*>")
        assert server.idle()
        child.send("/stats\r")
        child.expect("last answer")
        child.expect(r"\[\?2004h.*>")
        child.sendeof()
        assert settled(child) == 0
    assert health(server.url)["status"] == "ok"
