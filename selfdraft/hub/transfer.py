"""One file from the Hub into the cache: resumed, counted, verified before it has its name.

What is not whole lies beside the blobs as HASH.incomplete. The hash is of the content that is wanted, so a download
never goes on from another version of a file, and what it was put together from is hashed as a whole before it counts.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ..errors import DownloadFailed
from .listing import Listing, RemoteFile, explained

__all__ = ["Stopped", "fetch", "is_whole", "partial_path", "sweep"]

Count = Callable[[int], None]

_RETRIES = 5  # without a new byte
_PAUSE = 1.0  # seconds before the first of them; each next one is twice as long
_TIMEOUT = 30.0  # seconds of silence
_CHUNK = 1 << 20
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class Stopped(Exception):
    """The transfer was told to stop; what is there stays."""


def partial_path(blob: Path) -> Path:
    """Where the content of a blob lies while it is not whole."""
    return blob.with_name(f"{blob.name}.incomplete")


def fetch(listing: Listing, file: RemoteFile, count: Count, stop: threading.Event) -> None:
    """Fetch a file into its blob; one that is there is not fetched again.

    Args:
        count: called with the bytes that came in, those of an earlier try first; negative if they were of no use.
        stop: when set, the transfer ends at the next chunk.

    Raises:
        DownloadFailed: it did not come, or is not what the Hub promised, and is removed.
        Stopped: `stop` was set.
        OSError: it cannot be written.
    """
    blob = listing.blob(file)
    partial = partial_path(blob)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with open(partial, "ab", buffering=0) as content:
        if not _locked(content):
            raise DownloadFailed(f"another process fetches {file.name}; wait for it, and try again")
        if blob.exists():  # that process ended just now
            count(file.size)
            partial.unlink(missing_ok=True)
            return
        _receive(listing, file, content, count, stop)
        if not is_whole(partial, file, stop):
            partial.unlink()
            raise DownloadFailed(
                f"{listing.model}: {file.name} that came has not the size and hash that the Hub lists, and is removed; "
                f"`selfdraft pull {listing.model}` fetches it again"
            )
        os.replace(partial, blob)


def sweep(blobs: Path) -> None:
    """Remove what was left unfinished and nobody is at."""
    for partial in blobs.glob("*.incomplete"):
        if _HASH.fullmatch(partial.stem):  # other names are those of other programs, which may be running
            with open(partial, "ab") as content:
                if _locked(content):
                    partial.unlink(missing_ok=True)


def is_whole(path: Path, file: RemoteFile, stop: threading.Event) -> bool:
    """Whether a file has the size and the content that the Hub lists.

    Raises:
        Stopped: `stop` was set.
    """
    if path.stat().st_size != file.size:
        return False
    digest = hashlib.sha256()
    if len(file.digest) == 40:  # Git's: of a header and the content
        digest = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with path.open("rb") as content:
        while chunk := content.read(_CHUNK):
            if stop.is_set():
                raise Stopped
            digest.update(chunk)
    return digest.hexdigest() == file.digest


def _receive(listing: Listing, file: RemoteFile, content: IO[bytes], count: Count, stop: threading.Event) -> None:
    """Read on until the content has its size, over broken connections."""
    from huggingface_hub.errors import HfHubHTTPError

    if _length(content) > file.size:
        content.truncate(0)
    count(_length(content))
    failures = 0
    while (before := _length(content)) < file.size:
        problem: Exception | None = None
        try:
            _stream(listing, file, content, count, stop)
        except HfHubHTTPError as error:
            if error.response.status_code == 416:
                return  # there is no more of it: the size will tell
            if not _is_passing(error):
                raise explained(listing.model, error) from error
            problem = error
        except (Stopped, OSError):  # errors of a connection are no OSError here; those of a disk are
            raise
        except Exception as error:  # of the HTTP library
            problem = error
        failures = failures + 1 if _length(content) <= before else 0
        if failures > _RETRIES:
            raise DownloadFailed(
                f"{listing.model}: {file.name} broke off at byte {before:,} of {file.size:,} "
                f"({type(problem).__name__ if problem else 'nothing came'}), {failures} times; check the network, and "
                f"`selfdraft pull {listing.model}` goes on from there"
            ) from problem
        if failures and stop.wait(_PAUSE * 2 ** (failures - 1)):
            raise Stopped


def _stream(listing: Listing, file: RemoteFile, content: IO[bytes], count: Count, stop: threading.Event) -> None:
    """One request for what is missing."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    have = _length(content)
    url = hf_hub_url(listing.model.repository, file.name, revision=listing.commit)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={have}-"}
    with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT) as response:
        hf_raise_for_status(response)
        if response.status_code != 206 and have:  # this server sends all of it again
            content.truncate(0)
            count(-have)
        for chunk in response.iter_bytes():
            if stop.is_set():
                raise Stopped
            content.write(chunk)
            count(len(chunk))
            if _length(content) > file.size:
                return  # the hash will tell


def _locked(content: IO[bytes]) -> bool:
    """Whether the file is this process's alone, until it is closed."""
    try:
        fcntl.flock(content, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a disk that knows no locks
        return True
    return True


def _length(content: IO[bytes]) -> int:
    return os.fstat(content.fileno()).st_size


def _is_passing(error: Exception) -> bool:
    """Whether a server may answer otherwise in a moment."""
    response = getattr(error, "response", None)
    return response is not None and (response.status_code in (408, 429) or response.status_code >= 500)
