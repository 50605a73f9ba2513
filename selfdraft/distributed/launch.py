"""Starting the ranks of a group and waiting for them: several on this machine, or those of a host file. Imports no MLX.

Ranks here are started directly, with the environment that `mlx.launch` would give them; those of a host file by
`mlx.launch`, which knows ssh and every back end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from ..errors import InvalidRequest, SelfdraftError
from .environment import Backend
from .hostfile import Hosts

__all__ = ["environments", "run_here", "run_on_hosts"]

_LOOPBACK = "127.0.0.1"
_PATIENCE = 20.0  # seconds that rank 0 has to tell its clients once another rank is gone
_ENDED = re.compile(rb"Node with rank (\d+) (?:exited with code (-?\d+)|was killed)")


def run_here(command: Sequence[str], ranks: int, backend: Backend) -> None:
    """Run a command as so many ranks on this machine, until rank 0 ends.

    Raises:
        InvalidRequest: the back end does not run so.
        SelfdraftError: a rank ended with an error.
    """
    with tempfile.TemporaryDirectory(prefix="selfdraft-") as folder:
        told = environments(ranks, backend, Path(folder))
        processes = [subprocess.Popen(command, env={**os.environ, **each}, start_new_session=True) for each in told]
        try:
            with _signals_to(lambda: [processes[0].pid], lambda: [each.pid for each in processes]) as received:
                codes = _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    broken = [(rank, code) for rank, code in enumerate(codes) if code]
    if broken and not received:
        raise _ended(*min(broken, key=lambda each: each[1] > 0))  # if one was killed, the others ended for that


def run_on_hosts(command: Sequence[str], hosts: Hosts, backend: Backend, environment: Mapping[str, str]) -> None:
    """Run a command as one rank a host, by `mlx.launch`, until all end.

    Args:
        environment: what ranks elsewhere need of it.

    Raises:
        SelfdraftError: `mlx.launch` is not there; a host cannot be reached; a rank ended with an error.
    """
    launch = shutil.which("mlx.launch", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if launch is None:
        raise SelfdraftError("mlx.launch is not there: it comes with mlx; install selfdraft again")
    hosts.check_reachable()
    given = [f"--env={name}={value}" for name, value in environment.items()]
    whole = [launch, "--hostfile", str(hosts.path), "--backend", backend, *given, "--", *command]
    # A pipe that stays open and empty: mlx.launch would read the end of another input over and over.
    process = subprocess.Popen(whole, start_new_session=True, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    broken: list[tuple[int, int]] = []
    reader = threading.Thread(target=_copy_errors, args=(process, broken), daemon=True)
    reader.start()
    try:
        with _signals_to(lambda: _started_by(process)[:1], lambda: _started_by(process)) as received:
            process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    reader.join(5)
    if broken and not received:
        raise _ended(*broken[0])


def environments(ranks: int, backend: Backend, folder: Path) -> Iterator[dict[str, str]]:
    """What each rank on this machine is told."""
    if backend == "ring":
        hostfile = folder / "hosts.json"
        hostfile.write_text(json.dumps([[f"{_LOOPBACK}:{port}"] for port in _free_ports(ranks)]), encoding="utf-8")
        for rank in range(ranks):
            yield {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)}
    elif backend == "nccl":
        (port,) = _free_ports(1)
        meeting = {"NCCL_HOST_IP": _LOOPBACK, "NCCL_PORT": str(port), "MLX_WORLD_SIZE": str(ranks)}
        for rank in range(ranks):
            yield {"MLX_RANK": str(rank), "CUDA_VISIBLE_DEVICES": str(rank), **meeting}
    else:
        raise InvalidRequest(
            f"--ranks runs over ring or nccl on one machine, not over {backend}: give --hosts FILE", param="backend"
        )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server((_LOOPBACK, 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in taken]


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Until rank 0 has ended, or had its time to after another one did."""
    end = float("inf")
    while processes[0].poll() is None and time.monotonic() < end:
        if end == float("inf") and any(each.poll() for each in processes):
            end = time.monotonic() + _PATIENCE
        time.sleep(0.1)
    ended = time.monotonic() + 5
    while any(each.poll() is None for each in processes) and time.monotonic() < ended:
        time.sleep(0.05)
    # One that is ended by force did not fail: the reason is with another.
    return [each.poll() or 0 for each in processes]


@contextlib.contextmanager
def _signals_to(first: Callable[[], list[int]], everyone: Callable[[], list[int]]) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM go to rank 0, which ends the others; a second one ends all at once. Gives those that came."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        kind = signal.SIGTERM if len(received) == 1 else signal.SIGKILL
        for pid in first() if len(received) == 1 else everyone():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, kind)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _started_by(process: subprocess.Popen[bytes]) -> list[int]:
    """Processes of the ranks, or of ssh for them; that of rank 0 first, as far as can be told."""
    try:
        children = psutil.Process(process.pid).children()
    except psutil.NoSuchProcess:
        return []
    return [
        child.pid for child in sorted(children, key=lambda child: (_rank_of(child), child.create_time(), child.pid))
    ]


def _rank_of(process: psutil.Process) -> str:
    """Its rank; "" for one of ssh."""
    try:
        return process.environ().get("MLX_RANK", "")
    except psutil.Error:
        return ""


def _copy_errors(process: subprocess.Popen[bytes], broken: list[tuple[int, int]]) -> None:
    """Pass on what ranks say, and note how they ended: mlx.launch itself always ends with 0."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := _ENDED.search(line):
            broken.append((int(found[1]), int(found[2] or -signal.SIGTERM)))
        else:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()


def _ended(rank: int, code: int) -> SelfdraftError:
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return SelfdraftError(f"rank {rank} of the group {how}: the lines above say why; start the group again")
