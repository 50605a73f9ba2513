"""The one configuration object: arguments, else SELFDRAFT_* in the environment, else settings.toml, else defaults.

The engine's settings stand at the top of the file. Others extend `Settings` and have a table of their own in it, so
that a wrong line about the server does not keep `run` from running. Opens no other file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import platformdirs
from pydantic import AfterValidator, ByteSize, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from .device import Blas, Dtype
from .errors import FanError, InvalidRequest
from .fans import thermalforge
from .settings_file import Stored, forget, read_settings, remember, settings_path

__all__ = [
    "LEAST_IDS",
    "TABLES",
    "Origin",
    "Settings",
    "Stored",
    "StoredSettings",
    "checked",
    "forget",
    "load_settings",
    "origins",
    "remember",
    "settings_path",
]

TABLES = ("server", "start", "models", "tray")
LEAST_IDS = 256  # of a draft vocabulary

Origin = Literal["argument", "environment", "settings.toml", "default"]


class StoredSettings(BaseSettings):
    """Settings that may stand in the environment and in settings.toml.

    Attributes:
        tables: where in the file: "" is its top, before any table.
        unstored: fields that are not read from the file, and where to put them instead.
    """

    model_config = SettingsConfigDict(env_prefix="SELFDRAFT_", env_ignore_empty=True, extra="ignore", frozen=True)
    tables: ClassVar[tuple[str, ...]] = ()
    unstored: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Where values come from, the strongest first."""
        return init_settings, env_settings, _SettingsFile(cls)


class Settings(StoredSettings):
    """How the engine runs, as opposed to what a request asks for. Sizes are bytes, or text such as "20 GiB".

    Attributes:
        blas: BLAS of MLX's CPU back end on Linux: "auto" takes OpenBLAS where installed.
        dtype: of dense weights and activations; "auto" keeps what is stored, but on a CPU takes fp32 for quantised
            weights, and for dense ones with OpenBLAS.
        acceptance: rejection rule of unseeded sampling: block verification or token by token.
        prefill_chunk: prompt tokens of one forward.
        mode: how large buffers of keys and values are made: "turbo", in powers of two, so that few graphs are compiled;
            "sustained", once, for all that a request may need; "auto" takes turbo for prompts of up to
            32,768 tokens; "max" is sustained, with the fans of a Mac at maximum meanwhile. Changes no token.
        draft_vocabulary: how many of the first ids the head may draft, beside all special tokens; 0 for all. Others are
            emitted all the same, by corrections. Pays where the vocabulary is large for the model, in languages that
            the first ids serve.
        vision: whether images are read, by the vision tower of a checkpoint that has one: "auto" where the extra
            `selfdraft[vision]` is installed; "on" refuses a model that cannot; "off" leaves the tower's memory free.
        memory_limit: most bytes of weights, answers, warm prefixes and MLX's buffers together; None takes what is free.
            Weights or an answer that do not fit are refused before anything is read.
        session_cache_max_bytes: most bytes of warm prefixes in memory; 0 for none, None for a share of what is free.
        ssd_session_cache: whether warm prefixes are also kept on disk, or written there but not read.
        ssd_session_cache_dir: the folder on disk; None for the user's cache folder.
        ssd_session_cache_max_bytes: most bytes of the folder on disk.
        ssd_session_cache_hourly: most bytes written to that folder in an hour.
        ssd_session_cache_kv: how keys and values are stored in that folder: "exact", or "8bit", which changes them.
        adapter_path: folder of a LoRA or DoRA adapter for the trunk, in mlx-lm's format or PEFT's; None for none.
    """

    tables: ClassVar[tuple[str, ...]] = ("",)
    unstored: ClassVar[Mapping[str, str]] = {
        "adapter_path": "an adapter belongs to one model; give --adapter-path, or $SELFDRAFT_ADAPTER_PATH"
    }

    blas: Blas = "auto"
    dtype: Dtype = "auto"
    acceptance: Literal["block", "tokenwise"] = "block"
    prefill_chunk: int = Field(default=4096, ge=1, le=65536)
    mode: Literal["auto", "turbo", "sustained", "max"] = "auto"
    draft_vocabulary: Annotated[int, AfterValidator(lambda size: _enough_ids(size))] = 0
    vision: Literal["auto", "on", "off"] = "auto"
    memory_limit: Annotated[ByteSize, Field(ge=1)] | None = None
    session_cache_max_bytes: ByteSize | None = None
    ssd_session_cache: Literal["on", "write-only", "off"] = "on"
    ssd_session_cache_dir: Path | None = None
    ssd_session_cache_max_bytes: ByteSize = ByteSize(20 * 2**30)
    ssd_session_cache_hourly: ByteSize = ByteSize(40 * 2**30)
    ssd_session_cache_kv: Literal["exact", "8bit"] = "exact"
    adapter_path: Path | None = None

    @property
    def engine_mode(self) -> Literal["auto", "turbo", "sustained"]:
        """The mode as far as the engine knows it."""
        return "sustained" if self.mode == "max" else self.mode

    @property
    def session_folder(self) -> Path:
        """Where warm prefixes lie on disk."""
        folder = self.ssd_session_cache_dir
        return folder.expanduser() if folder else platformdirs.user_cache_path("selfdraft") / "sessions"


def _enough_ids(size: int) -> int:
    """Fewer could leave nothing to draft where end tokens are withheld."""
    if size < 0 or 0 < size < LEAST_IDS:
        raise ValueError(f"0 for all tokens, or {LEAST_IDS} ids and more")
    return size


_SIZE = ": a number of bytes, or a size such as 500MB, 4GiB or 1.5GiB"

Kind = TypeVar("Kind", bound=StoredSettings)


def load_settings(**given: object) -> Settings:
    """The engine's settings.

    Raises:
        InvalidRequest: a value that is not allowed, with where it comes from, the value and what is; the mode "max"
            where no fans can be held. Stored, that mode is taken: a file may be one for several machines.
    """
    return checked(Settings, given)


def checked(kind: type[Kind], given: Mapping[str, Any]) -> Kind:
    """Settings of a kind; see `load_settings`. A field of secret text is not shown.

    Args:
        given: arguments by name; None stands for one that was not given.
    """
    if unknown := given.keys() - kind.model_fields.keys():
        known = ", ".join(kind.model_fields)
        raise InvalidRequest(f"no setting {sorted(unknown)[0]!r}; there is {known}", param=sorted(unknown)[0])
    given = {name: value for name, value in given.items() if value is not None}
    try:
        if given.get("mode") == "max":
            thermalforge.find()
        return kind(**given)
    except FanError as error:
        raise InvalidRequest(f"setting mode: 'max' cannot be had here: {error}", param="mode") from error
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        variable = f"{kind.model_config['env_prefix']}{name}".upper()
        remedy = _SIZE if str(first["type"]).startswith("byte_size") else ""
        said = str(first["msg"]).removeprefix("Value error, ")
        message = f"setting {name} ({variable}): {said}{remedy}; got {first['input']!r}"
        if origins(kind, given).get(name) == "settings.toml":
            message = f"{settings_path()}: {message}. Correct that line, or delete it to have the default back"
        raise InvalidRequest(message, param=name) from error


def origins(kind: type[StoredSettings], given: Mapping[str, Any]) -> dict[str, Origin]:
    """Where the values of a kind of settings come from, by name; those that are not named are defaults.

    Args:
        given: arguments by name.

    Raises:
        InvalidRequest: settings.toml cannot be used.
    """
    names: tuple[Origin, ...] = ("argument", "environment", "settings.toml")
    here, environment = InitSettingsSource(kind, dict(given)), EnvSettingsSource(kind)
    sources = kind.settings_customise_sources(kind, here, environment, here, here)
    found: dict[str, Origin] = {}
    for origin, source in zip(names, sources, strict=True):
        found |= {name: origin for name in source() if name in kind.model_fields and name not in found}
    return found


class _SettingsFile(TomlConfigSettingsSource):
    """The part of settings.toml that is meant for a kind of settings. What nobody knows in that part is refused."""

    def __init__(self, kind: type[StoredSettings]) -> None:
        path = settings_path()
        content = read_settings()
        values: dict[str, Any] = {}
        for table in kind.tables:
            part = {name: value for name, value in content.items() if name not in TABLES}
            if table:
                part = content.get(table, {})
                if not isinstance(part, dict):
                    raise InvalidRequest(f"{path}: {table} must be a table: write [{table}] above its settings")
            _refuse_unknown(kind, table, part, path)
            values |= part
        self.toml_file_path = path
        self.toml_table_header = ()
        self.toml_data = values
        InitSettingsSource.__init__(self, kind, values)


def _refuse_unknown(kind: type[StoredSettings], table: str, part: Mapping[str, Any], path: Path) -> None:
    known = _fields(kind, table)
    for name, value in part.items():
        where = f"{path}: [{table}] {name}" if table else f"{path}: {name}"
        if name in kind.unstored:
            raise InvalidRequest(f"{where} is not read from this file: {kind.unstored[name]}", param=name)
        if name not in known:
            tables = "" if table else f", and the tables {', '.join(f'[{each}]' for each in TABLES)}"
            raise InvalidRequest(
                f"{where} = {value!r} is no setting; there is {', '.join(known)}{tables}. Correct or delete that line",
                param=name,
            )


def _fields(kind: type[StoredSettings], table: str) -> list[str]:
    """Names of the settings that belong into a table: those which the class that introduced it defines."""
    kinds = [each for each in reversed(kind.__mro__) if issubclass(each, StoredSettings)]
    owner = next(each for each in kinds if table in each.tables)
    inherited = {name for each in kinds[: kinds.index(owner)] for name in each.model_fields}
    return [name for name in owner.model_fields if name not in inherited and name not in kind.unstored]
