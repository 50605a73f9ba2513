"""Help is instant and complete: nothing heavy is imported for it, and every flag says its default."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import subprocess
import sys
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import selfdraft
from selfdraft.cli.app import app, main
from selfdraft.cli.flags import SessionFlags
from selfdraft.cli.sampling_flags import SamplingFlags
from selfdraft.params import SamplingParams
from selfdraft.settings import Settings

COMMANDS = (
    "start",
    "run",
    "chat",
    "connect",
    "inspect",
    "pull",
    "models",
    "remove",
    "doctor",
    "tune",
    "bench",
    "completions",
)
HEAVY = (
    *("mlx", "mlx_lm", "transformers", "tokenizers", "numpy", "huggingface_hub", "prompt_toolkit", "jinja2"),
    *("pydantic_settings", "fastapi"),  # a tenth of a second, and more
)


def options(command: str) -> list[Any]:
    group: Any = get_command(app)
    return [option for option in group.commands[command].params if option.name != "help"]


def help_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.output


def test_the_top_level_lists_every_command_with_one_line() -> None:
    lines = help_of().splitlines()
    for command in (*COMMANDS, "max"):
        (line,) = [line for line in lines if line.strip("│ ").startswith(command + " ")]
        assert line.strip("│ ").removeprefix(command).strip().endswith(".")


# What a request over HTTP may ask for and nobody at a terminal needs.
SERVED = {"cache_prompt"}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SamplingParams)])
def test_every_sampling_parameter_has_a_flag(field: str) -> None:
    flag = "--" + field.replace("_", "-")
    assert (flag in help_of("run")) == (field not in SERVED)
    assert (flag in help_of("chat")) == (field not in {"logprobs", *SERVED})  # a chat has no place to show them


@pytest.mark.parametrize("field", sorted(Settings.model_fields))
def test_every_setting_has_a_flag(field: str) -> None:
    for command in ("chat", "serve") if "session" in field else ("run", "chat", "serve"):
        assert "--" + field.replace("_", "-") in help_of(command)


def test_flags_carry_the_names_of_what_they_set() -> None:
    sampling = {field.name for field in dataclasses.fields(SamplingFlags)}
    assert sampling == {field.name for field in dataclasses.fields(SamplingParams)} - {"logprobs", *SERVED}
    assert {field.name for field in dataclasses.fields(SessionFlags)} == {"model", *Settings.model_fields}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_says_its_default(command: str) -> None:
    for option in options(command):
        assert option.help, option.name
        assert "Default: " in option.help or option.required or option.name in ("prompt", "client"), option.name


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_loses_no_words(command: str) -> None:
    text = help_of(command)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_no_markup(command: str) -> None:
    """What stands in brackets is taken for a style and not shown."""
    assert [option.name for option in options(command) if "[" in option.help] == []


def test_flags_are_unset_unless_given() -> None:
    assert SamplingFlags().params() == SamplingParams()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"selfdraft {selfdraft.__version__}"
    assert second.startswith(f"mlx {importlib.metadata.version('mlx')}, mlx-lm ")
    assert f"Python {platform.python_version()}" in second


def test_no_command_shows_the_help_and_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "inspect" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["start", "--help"],
        ["bench", "--help"],
        ["pull", "--help"],
        ["run", "--top-p", "7", "x"],
        ["completions", "bash"],
    ],
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom selfdraft.cli.app import main\n"
        f"main({arguments!r})\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
