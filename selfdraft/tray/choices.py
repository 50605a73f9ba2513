"""What was chosen in the menu, kept in settings.toml. Knows no menu."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic_settings import SettingsConfigDict

from ..settings import StoredSettings

__all__ = ["Mode", "TraySettings"]

Mode = Literal["auto", "turbo", "sustained", "max"]


class TraySettings(StoredSettings):
    """What `selfdraft tray` starts; the table [tray] of settings.toml, SELFDRAFT_TRAY_* in the environment.

    Attributes:
        model: its name, as `--model` takes it; None is what `selfdraft start` was told last.
        mode: as `--mode` takes it; None is the engine's own setting.
        keep_server: whether a server that was started from the menu goes on when the icon is gone.
    """

    model_config = SettingsConfigDict(env_prefix="SELFDRAFT_TRAY_")
    tables: ClassVar[tuple[str, ...]] = ("tray",)

    model: str | None = None
    mode: Mode | None = None
    keep_server: bool = False
