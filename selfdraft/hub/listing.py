"""What the Hub has under an id: one commit, and the files of it that a model needs. Everything it says is checked.

Only JSON, safetensors and Jinja templates are ever fetched: never pickles, never code. They stand at the top of the
repository, or in the folder of a step of a sentence-transformers model, such as 1_Pooling.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, DownloadFailed, ModelNotFound
from .cache import blobs_folder, snapshot_folder
from .names import ModelId, is_commit

__all__ = ["SUFFIXES", "Listing", "RemoteFile", "explained", "list_files"]

SUFFIXES = (".json", ".safetensors", ".jinja")

_STEP = re.compile(r"[0-9]+_[A-Za-z]+/(config\.json|model\.safetensors)")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class RemoteFile:
    """A file on the Hub.

    Attributes:
        name: in the model folder.
        size: bytes.
        digest: SHA-256 of a large file (64 hexadecimal digits), Git's SHA-1 of a small one (40); its name in the cache.
    """

    name: str
    size: int
    digest: str

    @property
    def is_weights(self) -> bool:
        """Whether it is a shard, which is large."""
        return self.name.endswith(".safetensors")


@dataclass(frozen=True)
class Listing:
    """A commit of a model.

    Attributes:
        model: what was asked for.
        commit: what that is now.
        files: those that are fetched.
    """

    model: ModelId
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def folder(self) -> Path:
        """Where the model will lie."""
        return snapshot_folder(self.model.repository, self.commit)

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)

    def blob(self, file: RemoteFile) -> Path:
        """Where the content of a file will lie."""
        return blobs_folder(self.model.repository) / file.digest


def list_files(model: ModelId) -> Listing:
    """Ask the Hub.

    Raises:
        ModelNotFound: no such model or revision, or no access to it.
        DownloadFailed: the Hub cannot be reached.
        CheckpointError: what it lists is no model that could be read, or is a trick.
    """
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(model.repository, revision=model.revision, files_metadata=True, timeout=30)
    except Exception as error:  # the Hub client raises many kinds, from its own and from its HTTP library's tree
        raise explained(model, error) from error
    if not is_commit(info.sha):
        raise CheckpointError(f"{model}: the Hub names {info.sha!r} as its commit, which is none; try again later")
    assert info.sha is not None
    files = [_checked(model, each) for each in info.siblings or () if each.rfilename.endswith(SUFFIXES)]
    found = tuple(sorted((file for file in files if file is not None), key=lambda file: file.name))
    if not any(file.name == "config.json" for file in found):
        raise CheckpointError(f"{model}: no config.json there; this is no model that can be loaded")
    if not any(file.is_weights for file in found):
        raise CheckpointError(
            f"{model}: no .safetensors files there (pickles and other weight formats are never fetched)"
        )
    return Listing(model, info.sha, found)


def explained(model: ModelId, error: Exception) -> CheckpointError:
    """What the Hub's client raised, in one sentence with a remedy."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return ModelNotFound(
            f"{str(model)!r} is gated: ask for access on its page of the Hugging Face Hub, then `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(f"{model.repository!r} has no revision {model.revision!r} on the Hugging Face Hub")
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return ModelNotFound(
            f"no {model.repository!r} on the Hugging Face Hub; check the name, and for a private model `hf auth login`"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return DownloadFailed(f"{model}: nothing is fetched while HF_HUB_OFFLINE is set; unset it, and try again")
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        return DownloadFailed(f"{model}: the Hugging Face Hub answered {error.response.status_code}; try again later")
    said = str(error).splitlines()[0] if str(error) else "no details"
    return DownloadFailed(
        f"{model}: the Hugging Face Hub cannot be reached ({type(error).__name__}: {said}); check the network"
    )


def _checked(model: ModelId, sibling: Any) -> RemoteFile | None:
    """A file that is wanted, or None for one in another folder. Names become paths here, and so do digests."""
    name = str(sibling.rfilename)
    if not _stays_inside(name):
        raise CheckpointError(f"{model}: {name!r} leads out of a model folder; nothing is fetched from there")
    if "/" in name and not _STEP.fullmatch(name):
        return None
    digest = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
    size = sibling.lfs.size if sibling.lfs is not None else sibling.size
    if not isinstance(size, int) or size < 0 or not _HASH.fullmatch(str(digest)):
        raise CheckpointError(
            f"{model}: the Hub gives {name} the size {size!r} and the hash {digest!r}; try again later"
        )
    return RemoteFile(name, size, digest)


def _stays_inside(name: str) -> bool:
    """Whether a name is a path below the folder, on every system that may read that disk."""
    odd = "\\" in name or ":" in name or not name.isprintable()
    return not odd and all(part not in ("", ".", "..") for part in name.split("/"))
