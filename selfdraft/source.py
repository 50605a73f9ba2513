"""From the name of a model to a folder: `reference`, a local folder, or a Hugging Face id."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from .errors import CheckpointError, DownloadFailed, ModelNotFound
from .hub.cache import cache_folder, snapshot_folder
from .hub.names import ModelId, parse
from .hub.pins import Pin, find_pin

__all__ = ["REFERENCE", "find_model"]

REFERENCE = "reference"
_SMALL = ["*.json", "*.jinja"]
_PATTERNS = [*_SMALL, "*.safetensors"]


def find_model(name: str, *, fetch: bool = True) -> Path:
    """The folder of a model. One that was pulled is there; another id is downloaded from the Hub if it has to be.

    Args:
        name: "reference" (the bundled checkpoint), a path to a folder, or "owner/name" or
            "owner/name@revision" on the Hugging Face Hub.
        fetch: whether to download what is not here.

    Raises:
        ModelNotFound: nothing by that name, or the Hub cannot be reached.
        CheckpointError: its small files say that it cannot run; its weights were not fetched.
    """
    if name == REFERENCE:
        return Path(__file__).parent / "assets" / REFERENCE
    folder = Path(name).expanduser()
    exists = bool(name) and folder.exists()  # Path("") is the current folder
    if exists and folder.is_dir():
        return folder
    if exists:
        raise ModelNotFound(f"{name!r} is a file; give the folder that holds config.json and the weights")
    model = parse(name)
    if model is None:
        raise ModelNotFound(
            f"no model {name!r}: give 'reference', an existing folder, or a Hugging Face id like 'owner/name'"
        )
    pin = find_pin(model.repository)
    return _pinned(pin) if pin is not None and pin.covers(model) else _download(model, fetch)


def _pinned(pin: Pin) -> Path:
    folder = snapshot_folder(pin.repository, pin.commit)
    if not (folder / "config.json").exists():
        raise ModelNotFound(
            f"{pin.repository!r} is pinned to commit {pin.commit}, which is not in {cache_folder()} any more: "
            f"`selfdraft pull {pin.repository}` fetches it again, `selfdraft remove {pin.repository}` drops the pin"
        )
    return folder


def _download(model: ModelId, fetch: bool) -> Path:
    from huggingface_hub import snapshot_download

    def take(patterns: list[str], *, local: bool) -> Path:
        return Path(
            snapshot_download(
                model.repository, revision=model.revision, allow_patterns=patterns, local_files_only=local
            )
        )

    try:
        if fetch and (names := _listed(model)):
            _refuse_early(take(_SMALL, local=False), names)
        return take(_PATTERNS, local=not fetch)
    except CheckpointError:  # of ours, with what is wrong
        raise
    except Exception as error:  # the Hub client raises many kinds, from its own and from its HTTP library's tree
        if not fetch:
            raise ModelNotFound(
                f"{str(model)!r} is no local folder, and not among the models that were downloaded"
            ) from error
        raise ModelNotFound(
            f"{str(model)!r} is no local folder and could not be fetched from the Hugging Face Hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}); "
            "check the name, the network, and for a gated model `hf auth login`"
        ) from error


def _listed(model: ModelId) -> list[str]:
    """Names of a model's files on the Hub; none where it cannot be asked: what is in the cache may do then."""
    from .hub.listing import list_files

    with suppress(DownloadFailed):
        return [file.name for file in list_files(model).files]
    return []


def _refuse_early(folder: Path, names: list[str]) -> None:
    """Refuse a model that cannot run before its weights are fetched."""
    from .models.checkpoint import Companion, accept  # MLX is imported here

    with suppress(Companion):
        accept(folder, names)
