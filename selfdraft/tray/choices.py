"""What was chosen in the menu, and where in settings.toml it is kept. Knows no menu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic_settings import SettingsConfigDict

from ..settings import StoredSettings, remember

__all__ = ["Choices", "Mode", "TraySettings", "keep"]

Mode = Literal["auto", "turbo", "sustained", "max"]

_TABLES = {"model": "start", "mode": "", "keep_server": "tray"}  # the first two are not the icon's alone


class TraySettings(StoredSettings):
    """What is the icon's alone; the table [tray] of settings.toml, SELFDRAFT_TRAY_* in the environment.

    Attributes:
        keep_server: whether a server that was started from the menu goes on when the icon is gone.
    """

    model_config = SettingsConfigDict(env_prefix="SELFDRAFT_TRAY_")
    tables: ClassVar[tuple[str, ...]] = ("tray",)

    keep_server: bool = False


@dataclass(frozen=True)
class Choices:
    """What would be started.

    Attributes:
        model: its name, as `--model` takes it; also what `selfdraft start` starts.
        mode: as `--mode` takes it; also that of other commands.
        keep_server: see `TraySettings`.
    """

    model: str
    mode: Mode
    keep_server: bool = False


def keep(choice: dict[str, Any]) -> None:
    """Write choices to settings.toml.

    Args:
        choice: by the names of `Choices`.

    Raises:
        InvalidRequest: the file cannot be read as TOML. OSError: it cannot be written.
    """
    for name, value in choice.items():
        remember(_TABLES[name], {name: value})
