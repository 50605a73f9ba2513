"""Servers as processes, and streams read from them with clocks at hand. Knows two servers' command lines."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 300.0  # seconds, for a model to be loaded and for a stream to move on

# mlx_lm.server takes the BLAS of its process, which is chosen before MLX is imported.
STOCK = """
import sys
from selfdraft.device import choose_blas
choose_blas(sys.argv.pop(1))
from mlx_lm import server
server.main()
"""


@dataclass(frozen=True)
class Stream:
    """One answer, as its client saw it. Times in seconds, from when the request was sent.

    Attributes:
        first: when the first text came.
        last: when the end was told.
        tokens: of the answer, as the server counts them.
        prompt_tokens: of the prompt. cached_tokens: of these, what was not forwarded.
    """

    text: str
    first: float
    last: float
    tokens: int
    prompt_tokens: int
    cached_tokens: int = 0

    @property
    def per_token(self) -> float:
        """Time between tokens: several may come at once, so it is that of all over their number."""
        return (self.last - self.first) / (self.tokens - 1)


@contextlib.contextmanager
def ours(model: str, *flags: str) -> Iterator[int]:
    """`selfdraft serve`, with the BLAS and dtype of this process's environment; its port."""
    command = [sys.executable, "-m", "selfdraft", "serve", "--model", model, "--log-level", "warning", *flags]
    with _serving(command) as port:
        yield port


@contextlib.contextmanager
def stock(folder: Path, blas: str, *, prompt_cache: int = 0) -> Iterator[int]:
    """mlx_lm.server with the checkpoint in a folder; its port.

    Args:
        prompt_cache: prompts it keeps; with any, the first token of one that was asked before comes early.
    """
    blas = "openblas" if blas == "openblas" else "reference"
    command = [sys.executable, "-c", STOCK, blas, "--model", str(folder), "--prompt-cache-size", str(prompt_cache)]
    with _serving([*command, "--log-level", "WARNING"]) as port:
        yield port


@contextlib.contextmanager
def in_dtype(folder: Path, dtype: str) -> Iterator[Path]:
    """A checkpoint with all floating tensors in a dtype: itself, or a copy for the time being."""
    import mlx.core as mx

    wanted: mx.Dtype = getattr(mx, dtype)
    files = {path: mx.load(str(path)) for path in folder.glob("*.safetensors")}
    if all(x.dtype == wanted for tensors in files.values() for x in tensors.values() if _floating(x)):
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for path in folder.iterdir():
            if path in files:
                cast = {key: x.astype(wanted) if _floating(x) else x for key, x in files[path].items()}
                mx.save_safetensors(str(copy / path.name), cast, {"format": "mlx"})
            elif path.is_file():
                shutil.copy(path, copy / path.name)
        files.clear()
        yield copy


def _floating(tensor: Any) -> bool:
    import mlx.core as mx

    return bool(mx.issubdtype(tensor.dtype, mx.floating))


def ask(port: int, prompt: str | Sequence[dict[str, str]], **fields: Any) -> Stream:
    """Stream a greedy answer to a message, or to a conversation.

    Raises:
        RuntimeError: the server refused, or broke off.
    """
    body = {
        "model": "default_model",
        "messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt),
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
        **fields,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with contextlib.closing(connection):
        begin = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read()[:500]!r}")
        # Parsed later: here the client has to keep up.
        lines = [(time.perf_counter() - begin, line) for line in response if line.startswith(b"data: {")]
    return _stream([(at, json.loads(line[6:])) for at, line in lines])


def _stream(events: Sequence[tuple[float, dict[str, Any]]]) -> Stream:
    pieces: list[tuple[float, str]] = []
    last, usage = None, None
    for at, event in events:
        if "error" in event:
            raise RuntimeError(f"the stream broke off: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                pieces.append((at, text))
            if choice["finish_reason"]:
                last = at
    if not pieces or last is None or usage is None:
        raise RuntimeError("the stream ended without text, a finish reason or usage")
    text = "".join(text for _, text in pieces)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Stream(text, pieces[0][0], last, usage["completion_tokens"], usage["prompt_tokens"], cached)


def ask_at_once(
    port: int, prompts: Sequence[str], clients: int, seconds: float, **fields: Any
) -> tuple[list[Stream], float]:
    """Clients that ask one prompt after the other for so many seconds.

    Returns:
        Their streams, and the seconds until the last of them ended.
    """
    streams: list[Stream] = []
    failures: list[BaseException] = []
    begin = time.perf_counter()

    def be_client(number: int) -> None:
        try:
            while not failures:
                streams.append(ask(port, prompts[number % len(prompts)], **fields))
                number += clients
                if time.perf_counter() - begin > seconds:
                    return
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=be_client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return streams, time.perf_counter() - begin


@contextlib.contextmanager
def _serving(command: list[str]) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=errors,
            stderr=errors,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        try:
            end = time.monotonic() + PATIENCE
            while not _healthy(port):
                if process.poll() is not None or time.monotonic() > end:
                    errors.seek(0)
                    raise RuntimeError(
                        f"{command[:3]} does not serve: {errors.read()[-2000:].decode(errors='replace')}"
                    )
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
