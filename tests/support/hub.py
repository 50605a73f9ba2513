"""A Hugging Face Hub on this machine: as much of it as its client needs, with every fault that is tested."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

__all__ = ["FakeHub", "commit_of", "digest_of", "fake_hub", "files_of", "use"]


def digest_of(name: str, content: bytes) -> str:
    """What the Hub calls a content: SHA-256 of large files, Git's hash of small ones."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def commit_of(files: dict[str, bytes]) -> str:
    """A commit's hash, of its files."""
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder, as a repository."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@dataclass
class FakeHub:
    """What it has, how it misbehaves, and what it was asked.

    Attributes:
        revisions: (repository, branch) -> files by name.
        gated: repositories that answer 401.
        status: answer everything with this.
        cut: file name -> bytes after which each answer breaks off, as often as told.
        busy: file name -> statuses that are answered before it is sent.
        served: file name -> what is sent instead of the content that is listed.
        lies: file name -> fields of its listing that are something else.
        elsewhere: send the content of shards from another host, as the real Hub does.
        ignores_ranges: answer 200 with everything to a request for a part.
        asked: (method, path, range) of each request.
        tokens: the token of each, by path.
        hold: what every file waits for.
    """

    revisions: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    status: int | None = None
    cut: dict[str, list[int]] = field(default_factory=dict)
    busy: dict[str, list[int]] = field(default_factory=dict)
    served: dict[str, bytes] = field(default_factory=dict)
    lies: dict[str, dict[str, Any]] = field(default_factory=dict)
    elsewhere: bool = False
    ignores_ranges: bool = False
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    tokens: dict[str, str | None] = field(default_factory=dict)
    url: str = ""
    hold: threading.Event | None = None

    def put(self, repository: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Put files on a branch; returns the commit."""
        self.revisions[repository, branch] = files
        self.revisions[repository, commit_of(files)] = files
        return commit_of(files)

    def fetched(self, name: str) -> list[str | None]:
        """The ranges in which a file was fetched."""
        return [range for method, path, range in self.asked if method == "GET" and path.endswith(f"/{name}")]

    def listing(self, files: dict[str, bytes]) -> list[dict[str, Any]]:
        """Files as the Hub lists them."""
        found = []
        for name, content in files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": digest_of(name, content)}
            if name.endswith(".safetensors"):
                entry["lfs"] = {"sha256": digest_of(name, content), "size": len(content), "pointerSize": 134}
                entry["blobId"] = hashlib.sha1(content).hexdigest()
            found.append(entry | self.lies.get(name, {}))
        return found


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *given: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        self.hub.tokens[path] = self.headers.get("Authorization")
        if path.startswith("/elsewhere/"):
            owner, name, commit, file = path.removeprefix("/elsewhere/").split("/")
            return self._file(self.hub.revisions[f"{owner}/{name}", commit], file)
        if self.hub.status:
            return self._send(self.hub.status, b"{}")
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repository = "/".join(parts[2:4] if api else parts[:2])
        if repository in self.hub.gated:
            return self._send(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        if all(known != repository for known, _ in self.hub.revisions):
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        revision, rest = ("main", parts[4:]) if api and len(parts) == 4 else (parts[5] if api else parts[3], parts[4:])
        files = self.hub.revisions.get((repository, revision))
        if files is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if not api and self.hub.elsewhere and rest[0].endswith(".safetensors"):
            place = f"{self.hub.url.replace('127.0.0.1', 'localhost')}/elsewhere/{repository}/{revision}/{rest[0]}"
            known = {"X-Linked-ETag": f'"{digest_of(rest[0], files[rest[0]])}"', "X-Repo-Commit": commit_of(files)}
            size = {"X-Linked-Size": str(len(files[rest[0]]))}
            return self._send(302, b"", {"Location": place} | known | size)
        if not api:
            return self._file(files, "/".join(rest))
        if rest and rest[0] == "tree":
            return self._json([self._in_tree(entry) for entry in self.hub.listing(files)])
        return self._json({"id": repository, "sha": commit_of(files), "siblings": self.hub.listing(files)})

    @staticmethod
    def _in_tree(entry: dict[str, Any]) -> dict[str, Any]:
        found = {"type": "file", "path": entry["rfilename"], "size": entry["size"], "oid": entry["blobId"]}
        if "lfs" in entry:
            found["lfs"] = {"oid": entry["lfs"]["sha256"], "size": entry["lfs"]["size"], "pointerSize": 134}
        return found

    def _file(self, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit_of(files)})
        content = self.hub.served.get(name, files[name])
        headers = {"X-Repo-Commit": commit_of(files), "ETag": f'"{digest_of(name, files[name])}"'}
        if self.command == "HEAD":
            return self._send(200, content, headers | {"X-Linked-Size": str(len(files[name]))})
        if self.hub.busy.get(name):
            return self._send(self.hub.busy[name].pop(0), b"")
        if self.hub.hold is not None:
            self.hub.hold.wait(20)
        begin, status = 0, 200
        if (wanted := self.headers.get("Range")) and not self.hub.ignores_ranges:
            begin, status = int(wanted.removeprefix("bytes=").removesuffix("-")), 206
            if begin >= len(content):
                return self._send(416, b"")
        cuts = self.hub.cut.get(name)
        self._send(status, content[begin:], headers, cut=cuts.pop(0) if cuts else None)

    def _json(self, body: Any) -> None:
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *given: object) -> None:
        """Clients that hang up are what is tested."""


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A Hub that answers while entered."""
    hub = FakeHub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def use(hub_url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this process and its children ask that Hub, with cache and pins of their own; returns the cache."""
    from huggingface_hub import constants

    cache = home / "hub"
    monkeypatch.setattr(constants, "ENDPOINT", hub_url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub_url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    for name, value in {"HF_ENDPOINT": hub_url, "HF_HOME": str(home), "HF_HUB_CACHE": str(cache)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    return cache
