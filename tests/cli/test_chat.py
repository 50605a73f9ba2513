"""`selfdraft chat`: in a terminal it survives Ctrl-C, errors and unknown commands; piped it answers line by line."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest

from selfdraft import SamplingParams
from selfdraft.cli.chat import GREETING, Interrupt, _terminal
from selfdraft.cli.conversation import Conversation, LocalConversation
from selfdraft.cli.slash import Leave, obey
from selfdraft.errors import ContextOverflow
from selfdraft.llm import LLM
from selfdraft.source import REFERENCE, find_model

from .conftest import COMMAND, Command

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture
def conversation(llm: LLM) -> LocalConversation:
    return LocalConversation(llm, GREEDY)


def say(conversation: Conversation, text: str, stopped: Callable[[], bool] = lambda: False) -> str:
    return "".join(conversation.answer(conversation.turn(text), stopped))


# A conversation


def test_memory_is_given_back_while_the_user_types(
    conversation: Conversation, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before each line, the first one too, and not while an answer runs."""
    lines = iter(["Hi"])
    events: list[str] = []

    class Typed:
        typed = False

        def __init__(self, history: object) -> None:
            pass

        def read(self) -> str:
            events.append("read")
            try:
                return next(lines)
            except StopIteration:
                raise EOFError from None

    monkeypatch.setattr("selfdraft.cli.line_input.LineInput", Typed)
    monkeypatch.setattr("selfdraft.cli.chat.silent_keys", contextlib.nullcontext)
    monkeypatch.setattr(llm, "release", lambda: events.append("release"))
    _terminal(conversation)
    assert events == ["release", "read", "release", "read"]


def test_history_is_the_conversation_so_far(conversation: Conversation, llm: LLM) -> None:
    conversation.system = "Be brief."
    first = say(conversation, "Hi")
    assert conversation.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": first}]
    turn = conversation.turn("And you?")
    system = [{"role": "system", "content": "Be brief."}]
    assert turn.tokens == llm.tokens([*system, *conversation.messages, {"role": "user", "content": "And you?"}])
    conversation.reset()
    assert conversation.turn("Hi").tokens == llm.tokens([*system, {"role": "user", "content": "Hi"}])


def test_a_stopped_answer_stays_and_frees_the_engine(conversation: Conversation, llm: LLM) -> None:
    conversation.params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0, depth=2)
    part = say(conversation, "Tell me a story.", lambda: any(len(row.emitted) >= 4 for row in llm.engine.rows))
    assert llm.engine.rows == []
    assert part
    assert conversation.messages[-1] == {"role": "assistant", "content": part}
    assert conversation.last is not None
    assert 1 <= conversation.last.cycles <= 3
    assert 4 <= conversation.last.tokens <= 4 + 2
    assert conversation.finish == "cancelled"


def test_a_turn_stopped_before_its_first_token_leaves_no_trace(conversation: Conversation, llm: LLM) -> None:
    say(conversation, "Hi")
    before, total = list(conversation.messages), conversation.total.tokens
    assert say(conversation, "And?", lambda: True) == ""
    assert (conversation.messages, conversation.total.tokens) == (before, total)
    assert llm.engine.rows == []


def test_a_turn_that_does_not_fit_is_taken_back(
    conversation: Conversation, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(conversation, "Hi")
    before = list(conversation.messages)
    monkeypatch.setattr(llm.engine.model, "context_length", 20)
    with pytest.raises(ContextOverflow):
        say(conversation, "What is your name? " * 5)
    assert conversation.messages == before
    assert llm.engine.rows == []
    conversation.reset()
    assert say(conversation, "Hi")


def test_reasoning_that_was_stopped_is_no_answer(conversation: Conversation, llm: LLM) -> None:
    conversation.think = True
    turn = conversation.turn("What is 12 + 30?")
    assert turn.reasoning
    part = "".join(conversation.answer(turn, lambda: any(row.emitted for row in llm.engine.rows)))
    assert conversation.messages[-1] == {"role": "assistant", "content": "", "reasoning_content": part}
    conversation.think = False
    assert not conversation.turn("Hi").reasoning


# Commands


def test_help_lists_every_command(conversation: Conversation) -> None:
    text = obey(conversation, "/help")
    for name in ("/help", "/reset", "/stats", "/depth N|auto", "/system TEXT", "/think on|off", "/quit"):
        assert name in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_unknown_command_is_named(conversation: Conversation) -> None:
    assert obey(conversation, "/rest now").startswith("no command '/rest'; /help lists them.")


def test_depth(conversation: Conversation) -> None:
    assert obey(conversation, "/depth") == "depth auto (up to 8)"
    assert obey(conversation, "/depth 2") == "depth 2"
    assert conversation.params == SamplingParams(temperature=0, max_tokens=12, depth=2)
    for wrong in ("9", "-1", "deep", "1.5"):
        assert "usage: /depth N|auto" in obey(conversation, f"/depth {wrong}")
        assert wrong in obey(conversation, f"/depth {wrong}")
    assert conversation.params.depth == 2
    assert obey(conversation, "/depth auto") == "depth auto (up to 8)"


def test_stats(conversation: Conversation) -> None:
    assert obey(conversation, "/stats") == "no answer yet"
    obey(conversation, "/depth 2")
    say(conversation, GREETING)
    say(conversation, "What can you do?")
    assert conversation.last is not None
    last, total = conversation.last, conversation.total
    assert total.tokens > last.tokens
    text = obey(conversation, "/stats").splitlines()
    assert text[1].startswith(f"  tokens       {last.tokens} (")
    assert text[2] == f"  cycles       {last.cycles} ({last.per_cycle:.2f} tokens a cycle)"
    assert text[3] == f"  acceptance   {last.acceptance}"
    assert text[5].startswith(f"  tokens       {total.tokens} (")
    assert text[8] == f"context        {conversation.length} of 32,768 tokens"
    obey(conversation, "/reset")
    assert f"  tokens       {total.tokens} (" in obey(conversation, "/stats")


def test_system_and_think(conversation: LocalConversation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert obey(conversation, "/system") == "no system prompt"
    assert obey(conversation, "/system Be  brief.") == "system prompt: Be  brief."
    assert conversation.system == "Be  brief."
    obey(conversation, "/system none")
    assert conversation.system is None
    obey(conversation, "/think on")
    assert conversation.think
    assert "not 'maybe'" in obey(conversation, "/think maybe")
    assert obey(conversation, "/think") == "thinking on"
    assert obey(conversation, "/think off") == "thinking off"
    monkeypatch.setattr(conversation.llm.template, "variables", frozenset())
    assert "knows no thinking" in obey(conversation, "/think on")
    assert not conversation.think


def test_quit(conversation: Conversation) -> None:
    with pytest.raises(Leave):
        obey(conversation, "/quit")


def test_the_second_ctrl_c_ends_what_runs() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# Piped


def test_a_message_a_line(inside: Command, llm: LLM) -> None:
    ended = inside("chat", "--temperature", "0", stdin=b"Hi\n\n/depth 1\nWho are you?\n/nope\n/quit\nnever read\n")
    first = llm.generate("Hi", SamplingParams(temperature=0)).text
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": first}]
    second = llm.generate([*history, {"role": "user", "content": "Who are you?"}], SamplingParams(temperature=0)).text
    assert (ended.code, ended.out) == (0, f"{first}\n{second}\n")
    assert ended.err.splitlines()[0] == "depth 1"
    assert ended.err.splitlines()[1].startswith("no command '/nope'")


def test_the_last_line_may_lack_its_newline(inside: Command) -> None:
    assert inside("chat", "--max-tokens", "3", stdin=b"Hi").out


def test_without_input_a_greeting_is_answered(process: Command) -> None:
    ended = process("chat", "--temperature", "0")
    assert ended.code == 0
    assert ended.out == "I am a very small language model that runs on this computer.\n"
    assert ended.err == f"selfdraft: no input: answering {GREETING!r}\n"


def test_an_error_ends_a_pipe(inside: Command, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.model, "context_length", 25)
    ended = inside("chat", "--max-tokens", "3", stdin=b"Hi\n" + b"a very long message " * 9 + b"\nHi\n")
    assert ended.code == 1
    assert len(ended.out.splitlines()) == 1
    assert ended.err.startswith("selfdraft: this model's maximum context length is 25 tokens")


def test_a_depth_that_cannot_be_is_refused_at_once(inside: Command) -> None:
    ended = inside("chat", "--depth", "9", stdin=b"Hi\n")
    assert (ended.code, ended.out) == (1, "")
    assert "depth 9 is not possible here" in ended.err


def test_a_model_without_a_template_cannot_chat(inside: Command, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "template", None)
    ended = inside("chat", stdin=b"Hi\n")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("selfdraft: reference has no chat template")


# In a terminal

PROMPT = r"\[\?2004h.*>"  # prompt_toolkit asks for bracketed paste, and shows the prompt
ANSWERING = r"\[\?2004l.*\w+ \w+ "  # it takes that back, and text streams

forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def spawn(environment: dict[str, str], *arguments: str) -> Any:
    """A chat in a terminal of 80 columns."""
    command = [*COMMAND[1:], "chat", *arguments]
    return pexpect.spawn(COMMAND[0], command, env=environment, encoding="utf-8", timeout=180, dimensions=(24, 80))


@forks
def test_a_chat_in_a_terminal(environment: dict[str, str]) -> None:
    terminal = spawn(environment, "--ignore-eos", "--max-tokens", "400", "--temperature", "0")
    terminal.expect("reference · depth auto")
    terminal.expect("Alt-Enter")
    terminal.expect(PROMPT)

    terminal.send("Tell me a story.\r")
    terminal.expect(ANSWERING)
    terminal.sendintr()
    terminal.expect(r"stopped, (\d+) tokens?, .*a cycle")
    assert 0 < int(terminal.match.group(1)) < 400

    terminal.send("/stats\r")
    terminal.expect("last answer")
    terminal.expect("acceptance")
    terminal.send("/depth 2\r")
    terminal.expect("2004ldepth 2\r")
    terminal.send("/rest\r")
    terminal.expect("no command '/rest'")

    terminal.send("one\\\rtwo\x1b\rthree")  # three lines, not sent
    terminal.expect("three")
    terminal.sendintr()  # clears them
    terminal.expect(PROMPT)
    terminal.sendintr()
    terminal.expect("/quit leaves")

    terminal.send("/reset\r")
    terminal.expect("a new one begins")
    terminal.send("What is 2 + 2?\r")
    terminal.expect(ANSWERING)
    terminal.sendintr()
    terminal.expect("stopped, ")
    terminal.expect(PROMPT)
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


@forks
def test_an_error_in_a_terminal_ends_the_turn_only(environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(find_model(REFERENCE), folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 24
    (folder / "config.json").write_text(json.dumps(config))
    child = spawn(environment, "--max-tokens", "3", "--model", str(folder))
    child.expect(PROMPT)
    child.send("This message is so long that it does not fit into a context of 24 tokens.\r")
    child.expect("selfdraft: this model's maximum context length")
    child.expect("/reset")
    child.expect(PROMPT)
    child.send("Hi\r")
    child.expect("3 tokens, ")
    child.expect(PROMPT)
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
