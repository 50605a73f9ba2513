"""Records what the coding agents send: tests/fixtures/clients, which tests/server/test_recorded_clients.py replays.

    usage: python -m tools.record_clients [AGENT ...]      (scripts/setup_agents.sh installs them)

Each agent takes one turn through its tools against a server whose model follows a script, with a proxy between them
that writes down every request. What is kept is the form: every field, name, type and schema, and who said what in
which order. What is not:

- the vendors' words. Their system prompts and tool descriptions are theirs, so every line of prose becomes filler of
  the same length in tokens; marks at its start and tags stay, so that a prompt keeps its shape.
- what tells of a machine, a person or a day: keys, ids, paths, versions of the system, dates.
"""

from __future__ import annotations

import gzip
import http.client
import itertools
import json
import platform
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from selfdraft.source import find_model
from selfdraft.text import Tokenizer
from tests.agents.agents import AGENTS, NOTES, PROMPT
from tests.agents.scripted import FIRST, SAID, load_scripted, playing, quick_checkpoint
from tests.server.conftest import running

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "tests" / "fixtures" / "clients"
TIMEOUT = 600
PLACE = "agent-under-record"
OURS = (PROMPT, NOTES.strip(), SAID, FIRST)  # words that are no vendor's
# Each is one token of the reference tokenizer, with a space before it or at the start of a line.
WORDS = ("water", "light", "river", "green", "place", "under", "other", "night", "number", "late", "west")
_MARK = re.compile(r"(\s*(?:[-*#>]+|\d+[.)])?\s*)(.*)", re.DOTALL)
_TAG = re.compile(r"(</?[A-Za-z][\w:-]*(?: [\w:-]+=\"[^\"<>]*\")*/?>)")
_PLACE = re.compile(rf"[\w./-]*/{PLACE}")
_CLOCK = re.compile(r"\b1\d{12}\b")
_SYSTEM = re.compile(r"\([A-Z][a-z]+ [\d.]+; \w+\)")  # of a User-Agent
_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<=ses_)[0-9A-Za-z]{20,}|[0-9a-f]{20,}")
CONNECTION = ("connection", "content-length", "host", "transfer-encoding")

Request = dict[str, Any]


def main() -> None:
    OUTPUT.mkdir(exist_ok=True)
    for name in sys.argv[1:] or AGENTS:
        agent = AGENTS[name]
        requests = record(name)
        scrubbed = list(map(Scrubber().scrub, requests))
        recorded = {"agent": agent.package, "version": agent.version, "requests": scrubbed}
        text = json.dumps(recorded, ensure_ascii=False, separators=(",", ":"))
        _check(text)
        content = text.encode()
        packed = gzip.compress(content, 9, mtime=0)
        (OUTPUT / f"{name}.json.gz").write_bytes(packed)
        print(f"{name}: {len(requests)} requests, {len(content)} bytes, {len(packed)} packed")


def record(name: str) -> list[Request]:
    """What an agent sends in one turn through its tools."""
    agent = AGENTS[name]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = quick_checkpoint(Path(folder) / "model")
        place = Path(folder) / PLACE
        place.mkdir()
        with (
            running(lambda: load_scripted(checkpoint, playing(agent.calls))) as server,
            listening(server.port) as (port, requests),
        ):
            run = agent.ask(f"http://127.0.0.1:{port}", place, timeout=TIMEOUT)
    if run.returncode or SAID not in run.stdout:
        sys.exit(f"{name} did not finish its turn:\n{run.stdout}{run.stderr}")
    if failed := [request for request in requests if request.pop("status") >= 400]:
        sys.exit(f"{name} was refused: {json.dumps(failed[0])[:2000]}")
    return requests


@contextmanager
def listening(port: int) -> Iterator[tuple[int, list[Request]]]:
    """A proxy in front of a server, and what came through it."""
    requests: list[Request] = []

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {key.lower(): value for key, value in self.headers.items() if key.lower() not in CONNECTION}
            request: Request = {"method": self.command, "path": self.path, "headers": headers}
            if body:
                request["body"] = json.loads(body)
            requests.append(request)
            server = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
            server.request(self.command, self.path, body, headers)
            response = server.getresponse()
            request["status"] = response.status
            self.send_response_only(response.status)
            for key, value in response.getheaders():
                if key.lower() not in CONNECTION:
                    self.send_header(key, value)
            self.send_header("Connection", "close")
            self.end_headers()
            while piece := response.read1():
                self.wfile.write(piece)
            server.close()
            self.close_connection = True

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = forward  # noqa: N815

        def log_message(self, format: str, *given: Any) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield proxy.server_port, requests
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()


class Scrubber:
    """Takes the vendors' words and all that is personal out of requests, the same in each."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_folder(find_model("reference"))
        self._known: dict[str, str] = {}

    def scrub(self, request: Request) -> Request:
        """A request without them."""
        headers = {key: self._anonymous(value) for key, value in request["headers"].items()}
        headers["authorization"] = "Bearer KEY"
        return request | {"headers": headers} | ({"body": self._body(request["body"])} if "body" in request else {})

    def _body(self, value: Any, key: str = "") -> Any:
        match value:
            case dict():
                return {name: self._body(inner, name) for name, inner in value.items()}
            case list():
                return [self._body(inner) for inner in value]
            case str():
                prose = len(value.split()) > (1 if key == "description" else 6)
                return self._anonymous(self._neutral(value) if prose else value)
            case _:
                return value

    def _neutral(self, text: str) -> str:
        return "".join(line if _is_kept(line) else self._filled(line) for line in text.splitlines(keepends=True))

    def _filled(self, line: str) -> str:
        mark, rest = _MARK.match(line).groups()  # type: ignore[union-attr]
        return mark + "".join(part if _TAG.fullmatch(part) else self._filler(part) for part in _TAG.split(rest))

    def _filler(self, text: str) -> str:
        core = text.strip()
        if not any(character.isalnum() for character in core):
            return text
        before, after = text.split(core)
        count = len(self._tokenizer.encode(core, special=False))
        return before + " ".join(itertools.islice(itertools.cycle(WORDS), count)) + after

    def _anonymous(self, text: str) -> str:
        text = _PLACE.sub("/home/user", text).replace(date.today().isoformat(), "2026-01-01")
        text = _SYSTEM.sub("(Linux; x86_64)", _CLOCK.sub("1700000000000", text))
        return _ID.sub(lambda found: self._replacement(found[0]), text)

    def _replacement(self, id: str) -> str:
        """An id of the same form, the same each time it occurs."""
        if id not in self._known:
            digits = iter(f"{len(self._known) + 1:0{sum(map(str.isalnum, id))}d}")
            self._known[id] = "".join(next(digits) if character.isalnum() else character for character in id)
        return self._known[id]


def _is_kept(line: str) -> bool:
    """Whether a line is not the vendor's prose; Claude Code's first line is for servers to take away."""
    return line.startswith("x-anthropic-billing-header:") or any(words in line for words in OURS)


def _check(content: str) -> None:
    """Stop if something personal is left."""
    today = date.today()
    telling = {PLACE, platform.node(), platform.release(), f"{Path.home()}/", f"{ROOT}/", f"{today}", f"{today:%b %d}"}
    if found := [word for word in telling if word and word in content]:
        sys.exit(f"these are still there: {', '.join(found)}")


if __name__ == "__main__":
    main()
