"""A Hugging Face Hub on this machine that takes uploads: as much of it as its client needs."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["UploadHub", "upload_hub"]


@dataclass
class UploadHub:
    """What it was given.

    Attributes:
        status: answer everything with this.
        made: what each repository was asked to be.
        files: name -> content, by repository.
        asked: paths of all requests.
    """

    status: int | None = None
    made: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    hub: UploadHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def log_message(self, *given: object) -> None:
        pass

    def _answer(self, body: bytes) -> None:
        path, hub = unquote(urlsplit(self.path).path), self.hub
        hub.asked.append(path)
        if hub.status:
            return self._send(hub.status, {"error": "no"})
        if path == "/api/repos/create":
            asked = json.loads(body)
            repository = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            hub.made[repository] = asked
            return self._send(200, {"url": f"{hub.url}/{repository}", "id": repository})
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        kind, _, rest = path.removeprefix("/api/models/").rpartition("/")
        repository, _, what = kind.rpartition("/")
        if what == "preupload":
            files = [{"path": each["path"], "uploadMode": "regular"} for each in json.loads(body)["files"]]
            return self._send(200, {"files": [{**each, "shouldIgnore": False} for each in files]})
        if what == "commit":
            kept = hub.files.setdefault(repository, {})
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    kept[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self._send(200, {"commitUrl": f"{hub.url}/{repository}/commit/{'0' * 40}", "commitOid": "0" * 40})
        if path.startswith("/api/models/") and what != "commit":
            return self._send(200, {"id": repository, "siblings": [], "sha": "0" * 40, "private": True})
        return self._send(404, {"error": f"nothing at {path}, {rest}"})

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True


@contextmanager
def upload_hub() -> Iterator[UploadHub]:
    """A Hub that answers while entered."""
    hub = UploadHub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
