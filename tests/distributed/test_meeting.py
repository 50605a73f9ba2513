"""Guards what happens before ranks serve: host files, who is let in, what must be alike; one clear error each."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from selfdraft.cli.app import main
from selfdraft.distributed import channel
from selfdraft.distributed.channel import Link, accept, call, listen
from selfdraft.distributed.environment import answers_requests, started_in_group
from selfdraft.distributed.facts import difference
from selfdraft.distributed.hostfile import read_hosts
from selfdraft.errors import InvalidRequest, SelfdraftError

HOSTS = [{"ssh": "127.0.0.1", "ips": ["10.0.0.1"]}, {"ssh": "second", "ips": ["10.0.0.2"]}]


def written(folder: Path, content: Any) -> Path:
    path = folder / "hosts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_host_file_is_read_as_mlx_launch_reads_it(tmp_path: Path) -> None:
    assert read_hosts(written(tmp_path, HOSTS), None).backend == "ring"
    found = read_hosts(written(tmp_path, {"backend": "jaccl", "hosts": HOSTS}), None)
    assert (found.backend, list(found.names)) == ("jaccl", ["127.0.0.1", "second"])
    assert read_hosts(written(tmp_path, {"backend": "jaccl", "hosts": HOSTS}), "ring").backend == "ring"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ({"hosts": 3}, "is no list of hosts"),
        ([{"ips": ["10.0.0.1"]}], "is no list of hosts"),
        (HOSTS[:1], "names 1 hosts"),
        ([HOSTS[0], {"ssh": "second"}], "'second' has no address"),
    ],
    ids=str,
)
def test_a_wrong_host_file_is_one_clear_line(
    content: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(InvalidRequest, match=said):
        read_hosts(path, None)
    assert main(["serve", "--hosts", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ranks", "1"], "2 to 64 ranks, not 1"),
        (["--ranks", "2", "--backend", "jaccl"], "not over jaccl"),
        (["--hosts", "/nowhere.json"], "cannot be read"),
        (["--backend", "ring"], "there are no ranks"),
    ],
)
def test_flags_that_cannot_be_obeyed(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_machine_that_lets_nobody_in_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = written(tmp_path, [HOSTS[0], {"ssh": "no-such-machine.invalid", "ips": ["10.0.0.2"]}])
    assert main(["serve", "--hosts", str(hosts)]) == 1
    said = capsys.readouterr().err
    assert "'no-such-machine.invalid' cannot be reached by ssh" in said


def test_a_process_knows_whether_it_is_alone() -> None:
    assert started_in_group({}) is None
    assert started_in_group({"NCCL_HOST_IP": "10.0.0.1"}) is None
    assert started_in_group({"MLX_RANK": "1", "MLX_HOSTFILE": "/hosts"}) == "ring"
    assert started_in_group({"MLX_RANK": "1", "NCCL_HOST_IP": "10.0.0.1"}) == "nccl"
    assert started_in_group({"OMPI_COMM_WORLD_RANK": "1"}) == "mpi"
    assert answers_requests({})
    assert answers_requests({"MLX_RANK": "0", "MLX_HOSTFILE": "/hosts"})
    assert not answers_requests({"MLX_RANK": "1", "MLX_HOSTFILE": "/hosts"})


@pytest.mark.parametrize("fact", ["mlx", "model"])
def test_what_differs_is_named(fact: str) -> None:
    mine = {"selfdraft": "1", "mlx": "2", "model": "3"}
    assert difference(mine, mine, "rank 1 (b)") == ""
    assert f"rank 1 (b) has {fact} 9, and rank 0 has {mine[fact]}" in difference(
        mine, {**mine, fact: "9"}, "rank 1 (b)"
    )


def test_a_stranger_is_no_rank() -> None:
    listener, secret = listen("127.0.0.1")
    port = listener.getsockname()[1]
    with listener:
        stranger = call("127.0.0.1", port, "0" * 32, {"rank": 1, "host": "x"})
        rank = call("127.0.0.1", port, secret, {"rank": 1, "host": "b"})
        found = accept(listener, secret, 1)
    with pytest.raises(SelfdraftError, match="ended"):
        stranger.receive()
    found[1][0].send(["welcome"])
    assert rank.receive() == ["welcome"]
    for link in (stranger, rank, found[1][0]):
        link.close()


@pytest.mark.parametrize(
    "nonsense", [b"5\n", b"null\n", b'["\xc3\xa9",{}]\n', b"[[],3]\n", b"\xff\n", b"[" * 200_000 + b"\n"], ids=range(6)
)
def test_a_stranger_that_talks_nonsense_is_hung_up_on(nonsense: bytes) -> None:
    listener, secret = listen("127.0.0.1")
    port = listener.getsockname()[1]
    with listener, socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(nonsense)
        rank = call("127.0.0.1", port, secret, {"rank": 1, "host": "b"})
        found = accept(listener, secret, 1)
    assert found[1][1]["host"] == "b"
    for link in (rank, found[1][0]):
        link.close()


def test_garbage_that_is_collected_while_a_message_is_sent_may_send_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = Link(socket.create_connection(listener.getsockname()[:2]), "rank 1")
        other = Link(listener.accept()[0], "rank 0")

    class Row:
        """As rows that are part of a circle are: nothing but the collector ends them."""

    row = Row()
    row.itself = row  # type: ignore[attr-defined]
    weakref.finalize(row, one.send, ["drop", 1])
    del row

    class Collecting:
        """A socket in whose call the collector runs."""

        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock

        def sendall(self, data: bytes) -> None:
            gc.collect()
            self.sock.sendall(data)

    real, one._socket = one._socket, Collecting(one._socket)  # type: ignore[assignment]
    sender = threading.Thread(target=one.send, args=(["forward"],), daemon=True)
    sender.start()
    sender.join(10)
    assert not sender.is_alive()
    assert sorted([other.receive(), other.receive()]) == [["drop", 1], ["forward"]]
    one._socket = real
    for link in (one, other):
        link.close()


def test_silence_is_a_loss_and_signs_of_life_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "LOST", 0.5)
    monkeypatch.setattr(channel, "BEAT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = Link(socket.create_connection(listener.getsockname()[:2]), "rank 1")
        other = Link(listener.accept()[0], "rank 0")
    other.beat()
    threading.Timer(1.0, other.send, [["late"]]).start()
    assert one.receive() == ["late"]
    begin = time.monotonic()
    with pytest.raises(SelfdraftError, match="rank 0 has not answered"):
        other.receive()
    assert time.monotonic() - begin < 2
    for link in (one, other):
        link.close()
