"""What a flag looks like, and the flags that commands share beside those of sampling, each defined once.

Commands take them in groups, as objects (see `command`). A default of None is the checkpoint's or the environment's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..device import Blas, Dtype
from ..errors import InvalidRequest

if TYPE_CHECKING:
    from ..settings import Settings

__all__ = [
    "AdapterPath",
    "ChatFlags",
    "EngineFlags",
    "SessionFlags",
    "TraceFlags",
    "flag",
    "number",
    "refusal",
    "whole",
]

_ENGINE = "Model and engine"
_SESSIONS = "Warm prefixes: what was read once is not read again"


def flag(
    names: str,
    help: str,
    panel: str | None = None,
    metavar: str = " ",
    parser: Callable[[str], Any] | None = None,
) -> Any:
    """An option.

    Args:
        names: one or two, with their dashes, separated by a space.
        help: says unit, range and default.
        panel: heading it stands under.
        metavar: what stands for the value; a switch has none.
        parser: from the text given to the value.
    """
    return typer.Option(
        *names.split(), help=help, rich_help_panel=panel, metavar=metavar, parser=parser, show_default=False
    )


def whole(text: str) -> int:
    """A whole number, or a message with what was given instead."""
    try:
        return int(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a whole number") from error


def number(text: str) -> float:
    """A number, or a message with what was given instead."""
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a number") from error


def refusal(error: InvalidRequest) -> typer.BadParameter:
    """The usage error, under the flag's name, for a parameter that was refused."""
    name = (error.param or "").split(" ")[0].replace("_", "-")
    return typer.BadParameter(str(error), param_hint=f"'--{name}'")


def _adapter_flag(panel: str | None) -> Any:
    return flag(
        "--adapter-path",
        "Folder with a LoRA or DoRA adapter for the trunk, in mlx-lm's format or PEFT's. "
        "Default: $SELFDRAFT_ADAPTER_PATH, else none.",
        panel,
        "FOLDER",
    )


AdapterPath = Annotated[Path | None, _adapter_flag(None)]


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Which model, and how the engine runs it; with `SessionFlags` every field of `Settings`, under the same name."""

    model: Annotated[
        str,
        flag(
            "--model -m",
            "'reference' (bundled), a local folder, or a Hugging Face id, OWNER/NAME or OWNER/NAME@REVISION. "
            "Default: reference.",
            _ENGINE,
            "NAME",
        ),
    ] = "reference"
    dtype: Annotated[
        Dtype | None,
        flag(
            "--dtype",
            "Of dense weights: bfloat16, float16, float32, or auto: as stored, but float32 on a CPU with OpenBLAS, "
            "where it is faster, and float16 on M1 and M2. Default: $SELFDRAFT_DTYPE, else auto.",
            _ENGINE,
            "TYPE",
        ),
    ] = None
    blas: Annotated[
        Blas | None,
        flag(
            "--blas",
            "Matrix library of MLX on a Linux CPU: openblas, reference, or auto: OpenBLAS where it is installed. "
            "Default: $SELFDRAFT_BLAS, else auto.",
            _ENGINE,
            "NAME",
        ),
    ] = None
    acceptance: Annotated[
        Literal["block", "tokenwise"] | None,
        flag(
            "--acceptance",
            "Rejection rule of unseeded sampling: block or tokenwise; both are exact. "
            "Default: $SELFDRAFT_ACCEPTANCE, else block.",
            _ENGINE,
            "RULE",
        ),
    ] = None
    vision: Annotated[
        Literal["auto", "on", "off"] | None,
        flag(
            "--vision",
            "Read images: auto: where the checkpoint has a vision tower and the extra vision is installed; on: refuse "
            "a model that cannot; off: leave the tower's memory free. Default: $SELFDRAFT_VISION, else auto.",
            _ENGINE,
            "WHEN",
        ),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        flag(
            "--prefill-chunk",
            "Prompt tokens of one forward pass, 1 to 65536. Default: $SELFDRAFT_PREFILL_CHUNK, else 4096.",
            _ENGINE,
            "TOKENS",
            whole,
        ),
    ] = None
    mode: Annotated[
        Literal["auto", "turbo", "sustained", "max"] | None,
        flag(
            "--mode",
            "How memory for a context is set aside: turbo, in few sizes that grow as needed; sustained, once, for all "
            "that a request may need; auto: turbo for prompts of up to 32768 tokens; max: sustained, with a Mac's fans "
            "at maximum meanwhile (needs ThermalForge). Default: $SELFDRAFT_MODE, else auto.",
            _ENGINE,
            "MODE",
        ),
    ] = None
    draft_vocabulary: Annotated[
        int | None,
        flag(
            "--draft-vocabulary",
            "How many of the first ids the head may draft, beside all special tokens; 0 for all. "
            "Default: $SELFDRAFT_DRAFT_VOCABULARY, else 0.",
            _ENGINE,
            "IDS",
            whole,
        ),
    ] = None

    memory_limit: Annotated[
        str | None,
        flag(
            "--memory-limit",
            "Most memory for weights, answers and warm prefixes together, as 12GiB; what does not fit is refused at "
            "once. Default: $SELFDRAFT_MEMORY_LIMIT, else what is free.",
            _ENGINE,
            "SIZE",
        ),
    ] = None
    adapter_path: Annotated[Path | None, _adapter_flag(_ENGINE)] = None

    def given(self) -> dict[str, Any]:
        """The settings among these flags, by name; None where a flag was not given."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "model"}

    def settings(self) -> Settings:
        """Settings from these flags, over the environment and settings.toml.

        Raises:
            typer.BadParameter: a value that is not allowed, under the flag's name.
            InvalidRequest: an environment variable, or a line of settings.toml, with such a value.
        """
        from ..settings import load_settings

        given = self.given()
        try:
            return load_settings(**given)
        except InvalidRequest as error:
            if given.get(error.param or "") is None:
                raise
            raise refusal(error) from error


@dataclass(frozen=True, kw_only=True)
class SessionFlags(EngineFlags):
    """The same for commands whose next turn goes on from the last."""

    session_cache_max_bytes: Annotated[
        str | None,
        flag(
            "--session-cache-max-bytes",
            "Memory for them, as 4GiB; 0 for none. Default: a quarter of what the weights leave.",
            _SESSIONS,
            "SIZE",
        ),
    ] = None
    ssd_session_cache: Annotated[
        Literal["on", "write-only", "off"] | None,
        flag(
            "--ssd-session-cache",
            "Whether they are kept on disk too, for the next start: on, write-only or off. Default: on.",
            _SESSIONS,
            "MODE",
        ),
    ] = None
    ssd_session_cache_dir: Annotated[
        Path | None,
        flag(
            "--ssd-session-cache-dir",
            "Folder for that. Default: the user's cache folder.",
            _SESSIONS,
            "FOLDER",
        ),
    ] = None
    ssd_session_cache_max_bytes: Annotated[
        str | None,
        flag(
            "--ssd-session-cache-max-bytes",
            "Most that folder may hold. Default: 20GiB.",
            _SESSIONS,
            "SIZE",
        ),
    ] = None
    ssd_session_cache_hourly: Annotated[
        str | None,
        flag(
            "--ssd-session-cache-hourly",
            "Most that is written there in an hour. Default: 40GiB.",
            _SESSIONS,
            "SIZE",
        ),
    ] = None
    ssd_session_cache_kv: Annotated[
        Literal["exact", "8bit"] | None,
        flag(
            "--ssd-session-cache-kv",
            "How keys and values are stored there: exact, or 8bit, which is smaller and not quite what was computed. "
            "Default: exact.",
            _SESSIONS,
            "FORM",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """What the chat template is told besides the messages."""

    system: Annotated[str | None, flag("--system", "System prompt. Default: none.", metavar="TEXT")] = None
    think: Annotated[
        bool,
        flag(
            "--think",
            "Let the model reason first, where its template knows thinking (enable_thinking). Default: off.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class TraceFlags:
    """What is told about a run, on standard error."""

    verbose: Annotated[
        bool, flag("--verbose -v", "Log a line of figures for each request to standard error. Default: off.")
    ] = False
    profile: Annotated[
        bool,
        flag(
            "--profile",
            "Time the stages of every cycle (this slows them down) and report to standard error at the end. "
            "Default: off.",
        ),
    ] = False
