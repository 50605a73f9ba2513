"""Talking to a server that runs: its health, its model, a streamed chat. Knows HTTP; nothing of terminals.

Straight to its address, past any proxy: it is on this machine or near it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from ..errors import ContextOverflow, InvalidRequest, SelfdraftError

__all__ = ["KeyNeeded", "ServedModel", "Unreachable", "chat_events", "health", "is_served", "metrics", "served_model"]

_SILENCE = 120.0  # seconds; a server that works says something at least every 60
_LOADING = 900.0  # seconds that a model may take to be loaded
_GLANCE = 0.1  # seconds between looks at whether the user has had enough


class Unreachable(SelfdraftError):
    """Nothing answers at that address, or something that is no server of ours."""


class KeyNeeded(SelfdraftError):
    """The server wants an API key, or another one."""


@dataclass(frozen=True)
class ServedModel:
    """What a server says of its model: the name, its limits, and whether it reads images."""

    name: str
    context: int
    output: int
    max_depth: int
    vision: bool = False


def health(url: str) -> dict[str, Any]:
    """What /health says, whatever the status; "unreachable" if nothing of ours answers."""
    try:
        body = _get(url, "/health", None)
    except SelfdraftError:
        return {"status": "unreachable"}
    return body if "status" in body else {"status": "unreachable"}


def served_model(url: str, key: str | None = None, name: str | None = None) -> ServedModel:
    """The model a server has.

    Args:
        key: the API key to present.
        name: one of its names; by default its first. A name it does not list is taken as a name of the first. A model
            that was never loaded is loaded now: it has no limits before.

    Raises:
        Unreachable: no server of ours there. KeyNeeded: it wants a key.
        SelfdraftError: the model cannot be loaded.
    """
    try:
        entry = _listed(url, key, name)
        if entry.get("state", "loaded") != "loaded" and "max_model_len" not in entry:
            body = _get(url, f"/tokenizer_info?model={quote(str(entry['id']), safe='')}", key, _LOADING)
            if "error" in body:
                raise SelfdraftError(f"{url}: {body['error']['message']}")
            entry = _listed(url, key, name)
        context, output, depth = (int(entry[limit]) for limit in ("max_model_len", "max_output_tokens", "max_depth"))
        vision = "image" in entry.get("architecture", {}).get("input_modalities", ())  # older servers say nothing
        return ServedModel(name or entry["id"], context, output, depth, vision)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Unreachable(f"what answers at {url} is no server of Selfdraft's") from error


def is_served(url: str, key: str | None, name: str) -> bool:
    """Whether a server answers to a name of a chat model."""
    try:
        return any(each["id"] == name for each in _chat_models(url, key))
    except (SelfdraftError, KeyError, TypeError):
        return False


def _listed(url: str, key: str | None, name: str | None) -> dict[str, Any]:
    listed = _chat_models(url, key)
    return next((each for each in listed if each["id"] == name), listed[0])


def _chat_models(url: str, key: str | None) -> list[dict[str, Any]]:
    """What a server lists, but what embeds or ranks, and cannot be talked with."""
    body = _get(url, "/v1/models", key)
    if "error" in body:
        raise SelfdraftError(f"{url}: {body['error']['message']}")
    return [each for each in body["data"] if each.get("type", "model") == "model"]


def metrics(url: str, key: str | None = None) -> str:
    """The text of /metrics.

    Raises:
        Unreachable: no server of ours there. KeyNeeded: it wants a key.
    """
    return _read(url, "/metrics", key).decode(errors="replace")


def _get(url: str, path: str, key: str | None, timeout: float = 5) -> dict[str, Any]:
    """The JSON object at a path, whatever the status, but 401."""
    try:
        body = json.loads(_read(url, path, key, timeout))
    except ValueError as error:
        raise Unreachable(f"no server answers at {url} ({_why(error)})") from error
    return body if isinstance(body, dict) else {}


def _read(url: str, path: str, key: str | None, timeout: float = 5) -> bytes:
    """What is at a path, whatever the status, but 401."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"{url}{path}", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        try:
            with opener.open(request, timeout=timeout) as response:
                body: bytes = response.read()
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 401:
                    raise _key_needed(url, key) from error
                body = error.read()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unreachable(f"no server answers at {url} ({_why(error)})") from error
    return body


def _why(error: Exception) -> str:
    cause = getattr(error, "reason", error)
    return str(getattr(cause, "strerror", None) or cause).lower()


def _key_needed(url: str, key: str | None) -> KeyNeeded:
    which = "another API key than the one in SELFDRAFT_API_KEY or api_key_file" if key else "an API key"
    return KeyNeeded(f"the server at {url} wants {which}: set SELFDRAFT_API_KEY")


def chat_events(
    url: str, key: str | None, body: Mapping[str, Any], stopped: Callable[[], bool]
) -> Generator[dict[str, Any]]:
    """The chunks of a streamed chat completion. Closing the iterator, or `stopped`, gives the answer up at once.

    Raises:
        ContextOverflow, InvalidRequest, KeyNeeded, SelfdraftError: what the server refuses, in its words.
        Unreachable: it went away.
    """
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_SILENCE)
    lines: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def read() -> None:
        try:
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(body),
                {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            )
            response = connection.getresponse()
            if response.status != 200:
                lines.put(_refusal(url, key, response))
            while response.status == 200 and (line := response.readline()):
                lines.put(line)
            lines.put(Unreachable(f"the server at {url} broke off; `selfdraft status` says whether it still runs"))
        except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:  # also when it is given up
            lines.put(Unreachable(f"the server at {url} does not answer ({_why(error)}); `selfdraft start` starts one"))

    try:
        connection.connect()
    except OSError as error:
        raise Unreachable(f"no server answers at {url} ({_why(error)}); `selfdraft start` starts one") from error
    wire = connection.sock
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield from _chunks(lines, stopped)
    finally:
        with contextlib.suppress(OSError):
            wire.shutdown(socket.SHUT_RDWR)  # wakes the reader
        reader.join(5)
        connection.close()


def _chunks(lines: queue.SimpleQueue[bytes | Exception], stopped: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    while not stopped():
        try:
            line = lines.get(timeout=_GLANCE)
        except queue.Empty:
            continue
        if isinstance(line, Exception):
            raise line
        data = line.removeprefix(b"data:").strip()
        if data == line.strip():  # a comment, or the end of an event
            continue
        if data == b"[DONE]":
            return
        chunk: dict[str, Any] = json.loads(data)
        if "error" in chunk:
            raise _refused(chunk["error"])
        yield chunk


def _refusal(url: str, key: str | None, response: http.client.HTTPResponse) -> SelfdraftError:
    if response.status == 401:
        return _key_needed(url, key)
    try:
        return _refused(json.loads(response.read())["error"])
    except (ValueError, KeyError, TypeError):
        return Unreachable(f"what answers at {url} is no server of Selfdraft's (HTTP {response.status})")


def _refused(error: Mapping[str, Any]) -> SelfdraftError:
    if error.get("code") == "context_length_exceeded":
        return ContextOverflow(str(error.get("message")))
    if error.get("type") == "invalid_request_error":
        return InvalidRequest(str(error.get("message")), param=error.get("param"))
    return SelfdraftError(str(error.get("message")))
