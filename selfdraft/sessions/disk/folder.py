"""The folder of the session cache: blobs named by the hash of their bytes, the lock, bytes in use. Knows no records.

The folder a user names holds `lock` and a folder for each version of the layout. What stands in the latter is the
cache's own; anything else in there is never touched, though it counts.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # no such locks here: one process is taken for granted
    fcntl = None  # type: ignore[assignment]

__all__ = ["LAYOUT", "Blob", "Buffer", "Damaged", "Folder", "Held", "cost", "is_name"]

LAYOUT = 1

_NEW = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

Buffer = bytes | memoryview


class Damaged(Exception):
    """What is there is not what was put there, or is not there any more."""


class Held(Exception):
    """Another process writes into the folder. `pid` is its number, None if it did not say."""

    def __init__(self, root: Path, pid: int | None) -> None:
        super().__init__(f"{root} is in use by process {pid or '?'}")
        self.root = root
        self.pid = pid


class Blob(NamedTuple):
    """A file of tensors: the sha256 of its bytes, in hex, and how many these are."""

    name: str
    size: int


class Folder:
    """Files of the session cache. Everything is for its owner alone, whatever the umask.

    Args:
        root: the folder that the user named.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.layout = root / f"v{LAYOUT}"
        self.index = self.layout / "index.sqlite"
        self._blobs = self.layout / "blobs"
        self._lock: int | None = None
        self._rest = 0

    def prepare(self) -> None:
        """Make the folders that are not there.

        Raises:
            OSError: they cannot be made, or somebody else's are there.
        """
        self.check_owner()
        missing = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        for folder in (*reversed(missing), self.layout, self._blobs):
            _make(folder)

    def check_owner(self) -> None:
        """Refuse a folder that another user can fill: what is restored from it would be theirs.

        Raises:
            PermissionError: it is another user's, or a link.
        """
        with contextlib.suppress(FileNotFoundError):
            info = self.layout.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "is no folder of this user's own", str(self.layout))

    def lock(self) -> None:
        """Become the one process that writes.

        Raises:
            Held: another one is. OSError: the file cannot be made, or not be locked.
        """
        descriptor = os.open(self.root / "lock", os.O_RDWR | _NEW, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(descriptor, 0o600)
            with contextlib.suppress(OSError):  # a full disk: the number is a courtesy
                os.ftruncate(descriptor, 0)
                os.write(descriptor, b"%d\n" % os.getpid())
        except BlockingIOError as error:
            os.close(descriptor)
            raise Held(self.root, self.holder()) from error
        except BaseException:
            os.close(descriptor)
            raise
        self._lock = descriptor

    def unlock(self) -> None:
        """Let another process write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def locked(self) -> bool:
        """Whether the lock that this process holds is still the folder's: somebody may have deleted it all."""
        try:
            return self._lock is not None and os.path.samestat(os.fstat(self._lock), os.stat(self.root / "lock"))
        except OSError:
            return False

    def holder(self) -> int | None:
        """The process that says it writes."""
        try:
            return int((self.root / "lock").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    def path(self, name: str) -> Path:
        """Where a blob lies."""
        return self._blobs / name[:2] / f"{name}.safetensors"

    def has(self, blob: Blob) -> bool:
        """Whether a file of that name and size is there; what is in it is not looked at."""
        try:
            return self.path(blob.name).stat().st_size == blob.size
        except OSError:
            return False

    def read(self, blob: Blob) -> bytes:
        """The bytes of a blob, checked against its name.

        Raises:
            Damaged: they are others, or cannot be read.
        """
        path = self.path(blob.name)
        try:
            with path.open("rb") as file:
                content = file.read(blob.size + 1)
        except OSError as error:
            raise Damaged(f"{path}: {error.strerror}") from error
        if len(content) != blob.size or hashlib.sha256(content).hexdigest() != blob.name:
            raise Damaged(f"{path}: its bytes are not those that were written")
        return content

    def write(self, content: Sequence[Buffer]) -> tuple[Blob, bool]:
        """Store bytes, durable when this returns. What is there already, and sound, is not written again.

        Returns:
            The blob, and whether it was written.

        Raises:
            OSError: it cannot be written; then nothing of it is left.
        """
        digest = hashlib.sha256()
        for chunk in content:
            digest.update(chunk)
        blob = Blob(digest.hexdigest(), sum(len(chunk) for chunk in content))
        if self.has(blob):
            with contextlib.suppress(Damaged):
                self.read(blob)
                return blob, False
        path = self.path(blob.name)
        fresh = path.with_suffix(".part")
        self.remove(blob.name)
        if not path.parent.exists():
            _make(path.parent)
            self._rest += cost(path.parent)
            _sync(self._blobs)
        try:
            _write(fresh, content)
            os.replace(fresh, path)
            self._rest += cost(path)
            _sync(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
                self.remove(blob.name)
            raise
        return blob, True

    def remove(self, name: str) -> None:
        """Delete a blob, if it is there, and its folder, if that is empty now.

        Raises:
            OSError: it cannot be deleted.
        """
        path = self.path(name)
        with contextlib.suppress(FileNotFoundError):
            size = cost(path)
            path.unlink()
            self._rest -= size
        with contextlib.suppress(OSError):
            size = cost(path.parent)
            path.parent.rmdir()
            self._rest -= size

    def unknown(self, known: Collection[str]) -> list[Path]:
        """Files among the blobs that are none of those named."""
        wanted = {self.path(name) for name in known}
        there = (Path(folder, name) for folder, _, files in os.walk(self._blobs) for name in files)
        return [path for path in there if path not in wanted]

    def sweep(self, known: Collection[str]) -> int:
        """Delete everything among the blobs that is none of those named.

        Returns:
            How many files went.
        """
        gone = 0
        for path in self.unknown(known):
            with contextlib.suppress(OSError):
                path.unlink()
                gone += 1
        for folder, _, _ in os.walk(self._blobs, topdown=False):
            if folder != str(self._blobs):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        self.measure()
        return gone

    def remove_index(self) -> None:
        """Delete the index."""
        for path in self._index_files():
            path.unlink(missing_ok=True)

    def remove_other_layouts(self) -> None:
        """Delete what other versions of this package left. The lock is theirs too, so none of them writes now."""
        for folder in _listed(self.root):
            if re.fullmatch(r"v[0-9]+", folder.name) and folder != self.layout and (folder / "index.sqlite").exists():
                shutil.rmtree(folder, ignore_errors=True)
                self.measure()

    def clear(self) -> None:
        """Delete everything of every layout. The lock stays."""
        self.remove_other_layouts()
        shutil.rmtree(self.layout)
        self.measure()

    def measure(self) -> int:
        """Bytes that the whole folder takes on disk, whoever put them there."""
        total = _total(self.root)
        self._rest = total - self._index_bytes()
        return total

    @property
    def bytes(self) -> int:
        """As at the last `measure`, but for what was written and removed since."""
        return self._rest + self._index_bytes()

    def _index_files(self) -> list[Path]:
        return [self.index.with_name(self.index.name + suffix) for suffix in ("", "-wal", "-shm", "-journal")]

    def _index_bytes(self) -> int:
        return sum(cost(path) for path in self._index_files())


def is_name(name: object) -> bool:
    """Whether it can be a blob's name."""
    return isinstance(name, str) and re.fullmatch(r"[0-9a-f]{64}", name) is not None


def cost(path: Path | os.DirEntry[str]) -> int:
    """Bytes that a file or folder itself takes: its blocks, or its length if that is more; 0 if it is not there."""
    try:
        info = path.stat(follow_symlinks=False)
    except OSError:
        return 0
    return max(info.st_size, info.st_blocks * 512)


def _total(folder: Path) -> int:
    total = cost(folder)
    waiting = [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    total += cost(entry)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:
            continue
    return total


def _listed(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def _make(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if stat.S_IMODE(folder.stat().st_mode) != 0o700:
        os.chmod(folder, 0o700)


def _write(path: Path, content: Iterable[Buffer]) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_EXCL | _NEW, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        for chunk in content:
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
