"""Guards the server as a child: it ends with its owner however that ends, unless it is kept; and its last words."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from selfdraft.cli.owned import KEEP, OWN
from selfdraft.errors import TrayError
from selfdraft.tray.process import ServerProcess
from tests.server.conftest import within

# A command of the same kind as `selfdraft serve`, which ends in order when it is told to.
SERVE = """
import pathlib, selfdraft.cli.app, selfdraft.cli.owned, signal, sys, time
def main(arguments):
    told = []
    def end(number, frame):
        told.append(number)
        if len(told) == 1:  # as answers that run, which a second signal cuts off
            time.sleep(0.5)
            pathlib.Path(arguments[-1]).write_text("ended in order" if len(told) == 1 else "cut off")
            sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    print("ready", flush=True)
    time.sleep(60)
selfdraft.cli.app.main = main
sys.argv = ["owned", *sys.argv[1:]]
sys.exit(selfdraft.cli.owned._main())
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ServerProcess]:
    made = ServerProcess([sys.executable, "-c", SERVE], tmp_path / "log" / "server.log", keep=KEEP, own=OWN)
    yield made
    made.ask_to_end()
    assert within(10, lambda: made.pid is None)


def script(text: str, log: Path) -> ServerProcess:
    return ServerProcess(["sh", "-c", text, "sh"], log, keep=KEEP, own=OWN)


def ended(process: ServerProcess) -> int:
    codes: list[int] = []

    def over() -> bool:
        code = process.take_exit()
        codes.extend([] if code is None else [code])
        return bool(codes)

    assert within(20, over)
    assert process.take_exit() is None  # told once
    return codes[0]


def ready(process: ServerProcess) -> bool:
    return within(30, lambda: "ready" in process._output.read_text())


def test_it_runs_with_its_log_and_ends_when_told(process: ServerProcess) -> None:
    process.start(["--model", "m"], keep=False)
    assert process.pid is not None
    assert psutil.Process(process.pid).cmdline()[-4:] == ["--model", "m", "--log-file", str(process.log)]
    assert os.getsid(process.pid) != os.getsid(0)  # Ctrl-C in our terminal is not for it
    assert ready(process)
    process.ask_to_end()
    assert ended(process) == 0
    assert process.log.read_text() == "ended in order"


def test_one_that_was_told_to_end_is_not_told_again_when_its_owner_goes(process: ServerProcess) -> None:
    process.start([], keep=False)
    assert ready(process)
    process.ask_to_end()
    assert process._child is not None
    assert process._child.stdin is not None
    time.sleep(0.2)  # two signals at once are one
    process._child.stdin.close()  # as when its owner is gone
    assert ended(process) == 0
    assert process.log.read_text() == "ended in order"


@pytest.mark.parametrize("kept", [False, True])
def test_when_its_owner_is_killed_it_ends_unless_it_is_kept(tmp_path: Path, kept: bool) -> None:
    log = tmp_path / "server.log"
    owner = f"""
import pathlib, sys, time
from selfdraft.tray.process import ServerProcess
process = ServerProcess([sys.executable, "-c", {SERVE!r}], pathlib.Path({str(log)!r}), keep={KEEP!r}, own={OWN!r})
process.start([], keep={not kept})
process.outlive({kept})
print(process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        server = psutil.Process(int(killed.stdout.readline()))
        assert within(30, lambda: "ready" in log.with_name("server-output.txt").read_text())
        killed.kill()
    if kept:
        time.sleep(1)
        assert server.is_running()
        server.terminate()
    assert within(10, lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    assert log.read_text() == "ended in order"


def test_a_crash_is_told_by_its_last_line_and_kept_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("before\n")
    process = script("echo 'listening on http://x' >&2; echo 'selfdraft: port 8000 is in use' >&2; exit 1", log)
    process.start([], keep=False)
    assert process.failure(ended(process)) == "port 8000 is in use (exit code 1)"
    assert log.read_text().startswith("before\n")
    assert "    selfdraft: port 8000 is in use\n" in log.read_text()


def test_a_crash_without_a_word_names_the_signal(tmp_path: Path) -> None:
    process = script("echo 'listening on http://x' >&2; kill -SEGV $$", tmp_path / "server.log")
    process.start([], keep=False)
    assert process.failure(ended(process)) == "ended by signal SIGSEGV"


def test_the_words_of_the_start_before_are_not_told_again(tmp_path: Path) -> None:
    process = script('[ "$1" = loud ] && echo old; exit 1', tmp_path / "server.log")
    process.start(["loud"], keep=False)
    assert process.failure(ended(process)) == "old (exit code 1)"
    process.start(["quiet"], keep=False)
    assert process.failure(ended(process)) == "ended by exit code 1"


def test_what_cannot_be_started_is_said(tmp_path: Path) -> None:
    with pytest.raises(TrayError, match="/no/such/program"):
        ServerProcess(["/no/such/program"], tmp_path / "server.log", keep=KEEP, own=OWN).start([], keep=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrayError, match="file"):
        script("true", tmp_path / "file" / "server.log").start([], keep=False)


def test_a_log_file_of_serve_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    from selfdraft.cli import serve

    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(serve, "_MOST_LOGGED", 2000)
    level = root.level
    serve.LogFlags(log_file=tmp_path / "server.log").apply()
    try:
        for index in range(400):
            root.info("a line of the log, number %d", index)
    finally:
        root.handlers[0].close()
        root.setLevel(level)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"server.log", "server.log.1", "server.log.2"}
    assert max(sizes.values()) <= 2000
    assert "number 399" in (tmp_path / "server.log").read_text()
