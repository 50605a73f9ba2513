"""Wrong input is refused before a model is loaded: exit code 2 and the flag's name, or 1 and one clear line."""

from __future__ import annotations

import pytest

from .conftest import Command

WRONG = [
    ("--depth", "-1"),
    ("--depth", "deep"),
    ("--max-tokens", "0"),
    ("--max-tokens", "many"),
    ("--temperature", "-0.1"),
    ("--temperature", "nan"),
    ("--top-p", "0"),
    ("--top-p", "1.5"),
    ("--top-k", "-1"),
    ("--min-p", "2"),
    ("--presence-penalty", "3"),
    ("--frequency-penalty", "-3"),
    ("--repetition-penalty", "0"),
    ("--logit-bias", "12"),
    ("--logit-bias", "x=1"),
    ("--logit-bias", "1=200"),
    ("--logit-bias", "-1=2"),
    ("--seed", "1.5"),
    ("--stop", ""),
    ("--min-tokens", "-1"),
    ("--dtype", "int8"),
    ("--blas", "mkl"),
    ("--acceptance", "greedy"),
    ("--prefill-chunk", "0"),
]


@pytest.mark.parametrize(("flag", "value"), WRONG)
@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_wrong_value_is_named(light: Command, command: str, flag: str, value: str) -> None:
    prompt = ["hello"] if command == "run" else []
    ended = light(command, flag, value, *prompt)
    assert (ended.code, ended.out) == (2, "")
    first, second = ended.err.splitlines()
    assert first.startswith(f"selfdraft: Invalid value for '{flag}': ")
    assert value.rpartition("=")[2] in first or value.partition("=")[0] in first
    assert second == f"Try 'selfdraft {command} --help'."


def test_the_range_is_named(light: Command) -> None:
    assert "top_p must lie in (0, 1]; got 1.5" in light("run", "--top-p", "1.5", "hello").err


def test_logprobs(light: Command) -> None:
    assert "'--logprobs': logprobs must be a whole number from 0 to 20" in light("run", "--logprobs", "21", "hello").err
    ended = light("run", "--logprobs", "2", "hello")
    assert (ended.code, ended.out) == (2, "")
    assert "--json" in ended.err


@pytest.mark.parametrize("extra", [["--think"], ["--system", "Be brief."]])
def test_raw_has_no_template_to_tell(light: Command, extra: list[str]) -> None:
    ended = light("run", "--raw", *extra, "hello")
    assert ended.code == 2
    assert "'--raw'" in ended.err


@pytest.mark.parametrize("arguments", [["rnu"], ["run", "--top-x", "1"], ["run", "a", "b"], ["inspect", "a", "b"]])
def test_unknown_words(light: Command, arguments: list[str]) -> None:
    ended = light(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("selfdraft: ")


@pytest.mark.parametrize("arguments", [["run"], ["run", "-"], ["run", ""], ["run", "--json"]])
@pytest.mark.parametrize("stdin", [b"", b" \n"])
def test_an_empty_prompt(light: Command, arguments: list[str], stdin: bytes) -> None:
    ended = light(*arguments, stdin=stdin)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "selfdraft: the prompt is empty; write something\n"


def test_a_prompt_that_is_no_text(light: Command) -> None:
    ended = light("run", stdin=b"caf\xe9")
    assert ended.code == 1
    assert ended.err == "selfdraft: standard input is not UTF-8 (byte 0xe9 at 3); convert it with iconv\n"


def test_a_bad_environment_variable_is_named(light: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFDRAFT_PREFILL_CHUNK", "0")
    ended = light("run", "hello")
    assert (ended.code, ended.out) == (1, "")
    assert "SELFDRAFT_PREFILL_CHUNK" in ended.err


@pytest.mark.parametrize("command", [["run", "hi", "--json", "-m"], ["inspect"]])
def test_an_unknown_model(process: Command, command: list[str]) -> None:
    ended = process(*command, "no-such-model")
    assert (ended.code, ended.out) == (1, "")
    (line,) = ended.err.splitlines()
    assert line.startswith("selfdraft: no model 'no-such-model': give 'reference', an existing folder")
