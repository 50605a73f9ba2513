"""llama.cpp, drafting with a GGUF file's own MTP head: a `llama-server`, asked over HTTP and ended afterwards.

Prompts go to it as token ids, so that its tokenizer plays no part; times are those that it reports itself.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from ..llm import LLM
from .measure import SEED, Tally
from .peer import PeerError
from .subject import Subject

__all__ = ["LlamaCpp", "find_gguf", "llama_cpp_peer"]

DRAFTS = 3  # what llama-server drafts when not told otherwise
CONTEXT = 4096  # of the server; a benchmark's prompts and answers are far shorter
PATIENCE = 600.0  # seconds for reading the weights, and for one answer
GRACE = 5.0  # seconds to end in when told to
PAUSE = 0.1  # seconds between two looks at whether it is ready

_PART = re.compile(r"-(\d{5})-of-\d{5}$")
_ERROR = re.compile(r"[\d.]+ E\s+")  # how such a line begins: seconds and level


@dataclass(frozen=True)
class LlamaCpp:
    """A `llama-server` that runs."""

    name: str
    version: str
    drafts: int
    port: int

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> Tally:
        """See `Peer.decode`. How many drafts stayed is known in sum only: no acceptance by position."""
        total = Tally()
        for prompt in prompts:
            body = {
                "prompt": list(prompt),
                "n_predict": tokens,
                "temperature": 0,
                "top_k": 1,
                "seed": SEED,
                "ignore_eos": True,
                "cache_prompt": False,  # else the next round would find the prompt read
            }
            try:
                times = _ask(self.port, "POST", "/completion", body)["timings"]
                decoded = int(times["predicted_n"]) - 1  # the first one comes with the prompt
                seconds, prompt_seconds = float(times["predicted_ms"]) / 1e3, float(times["prompt_ms"]) / 1e3
                cycles = decoded - int(times.get("draft_n_accepted", 0))  # each emits one token more than it accepts
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise PeerError(f"its answer has no timings as expected ({type(error).__name__}: {error})") from error
            if "draft_n" not in times and decoded > self.drafts:
                raise PeerError("it decodes without drafts: this build or this file knows no draft-mtp")
            total += Tally(decoded, seconds, cycles, prompt_seconds)
        return total


@contextlib.contextmanager
def llama_cpp_peer(subject: Subject, gguf: Path | None = None) -> Iterator[LlamaCpp]:
    """Serve a GGUF file of a subject's model, with drafts, until the context is left, however it is left.

    Args:
        gguf: the file; else the one beside the model (see `find_gguf`).

    Raises:
        PeerError: no `llama-server`, no file, it cannot be served with drafts, or it is of another model.
    """
    program = shutil.which("llama-server")
    if program is None:
        raise PeerError("not installed (no llama-server on the PATH)")
    if not isinstance(subject.source, LLM):
        raise PeerError("there is no GGUF file of a synthetic model")
    file = gguf or find_gguf(subject.source.checkpoint.folder)
    port = _free_port()
    command = [program, "--model", str(file), "--host", "127.0.0.1", "--port", str(port), "--parallel", "1"]
    command += ["--ctx-size", str(min(CONTEXT, subject.model.context_length))]
    command += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(DRAFTS)]
    if subject.described["device"] == "cpu":
        command += ["--device", "none"]  # else it takes a GPU that we were told to leave
    with tempfile.TemporaryFile() as said, _process(command, said) as process:
        _await(process, port, said)
        kind = _checked(port, subject.source, file)
        version = str(_ask(port, "GET", "/props").get("build_info", "unknown"))
        peer = LlamaCpp(f"llama.cpp {kind}, {DRAFTS} drafts", version, DRAFTS, port)
        peer.decode([subject.prompts[0]], 2 * DRAFTS)  # said before the rounds begin, not in the first of them
        yield peer


def find_gguf(folder: Path) -> Path:
    """The one GGUF file in a model's folder, or beside it under a name that begins with the folder's.

    Projectors of images and later parts of a divided file do not count.

    Raises:
        PeerError: there is none, or several.
    """
    found = [*folder.glob("*.gguf"), *(file for file in folder.parent.glob("*.gguf") if _begins(file, folder))]
    whole = [file for file in sorted(found) if "mmproj" not in file.name and not _later_part(file)]
    if len(whole) == 1:
        return whole[0]
    if whole:
        raise PeerError(f"several GGUF files ({', '.join(file.name for file in whole)}); choose one with --gguf FILE")
    raise PeerError(f"no GGUF file in {folder} or beside it; name one with --gguf FILE")


def _begins(file: Path, folder: Path) -> bool:
    return file.name.lower().startswith(folder.name.lower())


def _later_part(file: Path) -> bool:
    part = _PART.search(file.stem)
    return part is not None and int(part[1]) > 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _process(command: Sequence[str], said: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended when the context is left: also by Ctrl-C, a polite kill, or a closed terminal."""
    # What the user set for servers of their own would change what is measured.
    foreign = ("LLAMA_ARG_", "LLAMA_API")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    with _signals_unwind():
        try:
            # In a session of its own, Ctrl-C does not make it speak up as well.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment, start_new_session=True
            )
        except OSError as error:
            raise PeerError(f"{command[0]} cannot be started ({error})") from error
        try:
            yield process
        finally:
            try:
                process.terminate()
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                pass  # it is busy
            finally:
                process.kill()  # nothing happens if it has ended
                process.wait()


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """Have SIGTERM and SIGHUP, which end Python on the spot, leave by way of every `finally`."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers can be set in the main thread only
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    caught = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in caught:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


def _await(process: subprocess.Popen[bytes], port: int, said: IO[bytes]) -> None:
    """Wait until it is ready to answer."""
    end = time.monotonic() + PATIENCE
    while True:
        if process.poll() is not None:
            raise PeerError(f"llama-server ended with code {process.returncode}: {_reason(said)}")
        with contextlib.suppress(PeerError):
            _ask(port, "GET", "/health")
            return
        if time.monotonic() > end:
            raise PeerError(f"llama-server was not ready after {PATIENCE:.0f} s: {_reason(said)}")
        time.sleep(PAUSE)


def _reason(said: IO[bytes]) -> str:
    """Why it ended: its first line of level E, since others only repeat it; else the first that sounds so."""
    said.seek(0)
    lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    marked = [line for line in lines if _ERROR.match(line)]
    sounding = [line for line in lines if "error" in line.lower() or "failed" in line.lower()]
    return _ERROR.sub("", [*marked, *sounding, *lines[-1:], "it said nothing"][0])[:200]


def _checked(port: int, llm: LLM, file: Path) -> str:
    """How its weights are stored, if it is a model of our vocabulary and width: ids of another would mean others."""
    try:
        meta = _ask(port, "GET", "/v1/models")["data"][0]["meta"]
        kind = str(meta["ftype"]).split()[0]
    except (KeyError, IndexError, TypeError) as error:
        raise PeerError(f"it does not describe its model as expected ({type(error).__name__}: {error})") from error
    width = llm.checkpoint.text_config.get("hidden_size")
    for what, theirs, ours in (
        ("a vocabulary", meta.get("n_vocab"), llm.engine.model.vocab_size),
        ("a hidden size", meta.get("n_embd"), width),
    ):
        if None not in (theirs, ours) and theirs != ours:
            raise PeerError(f"{file.name} is another model: it has {what} of {theirs}, ours of {ours}")
    return kind


def _ask(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object it answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        answer: dict[str, Any] = json.loads(text)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PeerError(f"llama-server does not answer {path} ({type(error).__name__}: {error})") from error
    finally:
        connection.close()
    if response.status != http.client.OK or not isinstance(answer, dict):
        raise PeerError(f"llama-server answers {path} with {response.status}: {text.decode(errors='replace')[:200]}")
    return answer
