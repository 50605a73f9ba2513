"""Guards the engine's thread without HTTP: what must happen inside a step, where no request can look."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from selfdraft.errors import GroupBroken
from selfdraft.llm import LLM
from selfdraft.params import SamplingParams
from selfdraft.results import Piece
from selfdraft.server import service as services
from selfdraft.server.errors import Loading
from selfdraft.server.service import EngineService

from .conftest import Running, running, within


def test_an_answer_given_up_in_its_prefill_ends_between_two_layers(load_nano: Callable[[], LLM]) -> None:
    inside, given_up = threading.Event(), threading.Event()
    told: list[int] = []

    def on_prefill(done: int, total: int) -> None:
        told.append(done)
        inside.set()
        given_up.wait(20)

    async def scenario(service: EngineService) -> Piece | Exception:
        answer = service.llm.answer(list(range(1, 300)), SamplingParams(max_tokens=4), on_prefill=on_prefill)
        tickets = service.submit([answer])
        await asyncio.to_thread(inside.wait, 20)
        service.cancel(tickets)  # the thread is in the middle of a chunk, and reads no mail
        given_up.set()
        return (await asyncio.wait_for(tickets[0].received.get(), 20))[1]

    with running(load_nano) as server:
        last = asyncio.run(scenario(server.service))
        assert server.idle()
    assert isinstance(last, Piece)
    assert last.result is not None
    assert last.result.finish_reason == "cancelled"
    assert len(told) == 1


def test_when_the_engine_ends_everyone_is_told(load_nano: Callable[[], LLM]) -> None:
    """Whoever runs, waits, or is still in the mail; and whoever comes later."""
    inside, sent = threading.Event(), threading.Event()

    def on_prefill(done: int, total: int) -> None:
        inside.set()
        sent.wait(20)

    async def scenario(service: EngineService) -> list[Piece | Exception]:
        def answer() -> object:
            return service.llm.answer([1, 2, 3], SamplingParams(max_tokens=4), on_prefill=on_prefill)

        tickets = service.submit([answer()])  # type: ignore[list-item]
        await asyncio.to_thread(inside.wait, 20)
        service._hand_out = lambda: 1 / 0  # type: ignore[assignment, method-assign]
        tickets += service.submit([answer()])  # type: ignore[list-item]  # the thread reads no mail now
        sent.set()
        told = [(await asyncio.wait_for(ticket.received.get(), 20))[1] for ticket in tickets]
        with pytest.raises(Loading, match="log says why"):
            service.submit([answer()])  # type: ignore[list-item]
        return told

    with running(load_nano) as server:
        told = asyncio.run(scenario(server.service))
        assert within(5, lambda: not server.service.busy)
    assert all(isinstance(each, Exception) for each in told)
    assert len(told) == 2


@pytest.mark.parametrize("hangs", [False, True])
def test_what_cannot_be_decoded_any_more_ends_everyone_with_the_reason(
    load_nano: Callable[[], LLM], hangs: bool
) -> None:
    """A step that is broken off and cannot be made up for; or one that never ends, told of from another thread."""
    reason = GroupBroken("rank 1 ended")
    inside, never = threading.Event(), threading.Event()

    def on_prefill(done: int, total: int) -> None:
        inside.set()
        if hangs:
            never.wait(30)
        raise RuntimeError("a message that nobody sent")

    async def scenario(service: EngineService) -> Piece | Exception:
        service.beyond_repair = lambda: reason
        answer = service.llm.answer([1, 2, 3], SamplingParams(max_tokens=4), on_prefill=on_prefill)
        (ticket,) = service.submit([answer])
        await asyncio.to_thread(inside.wait, 20)
        if hangs:
            service.fail(reason)
        return (await asyncio.wait_for(ticket.received.get(), 5))[1]

    with running(load_nano) as server:
        told = asyncio.run(scenario(server.service))
        assert not server.service.ready
        never.set()
    assert told is reason


def test_an_idle_server_gives_spare_buffers_back_once(
    load_nano: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while without a row, again after the next answer, and never beside one."""
    monkeypatch.setattr(services, "_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(services, "_TIDY_SECONDS", 0.05)
    rows: list[int] = []

    def load() -> LLM:
        llm = load_nano()

        def release() -> int:
            rows.append(len(llm.engine.rows))
            return 100

        monkeypatch.setattr(llm, "release", release)
        return llm

    def counted(server: Running) -> list[str]:
        with server.client() as client:
            return [line for line in client.get("/metrics").text.splitlines() if line.startswith("selfdraft_memory_")]

    with running(load) as server:
        assert within(5, lambda: len(rows) == 1)
        with server.client() as client:
            asked = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 30}
            assert client.post("/v1/chat/completions", json=asked).status_code == 200
            assert within(5, lambda: len(rows) == 2)
        threading.Event().wait(0.3)
        lines = counted(server)
        granted = server.service.llm.budget.granted
    assert rows == [0, 0]
    assert 'selfdraft_memory_releases_total{model_name="nano"} 2.0' in lines
    assert 'selfdraft_memory_released_bytes_total{model_name="nano"} 200.0' in lines
    for kind, size in (("budget", granted.total), ("weights", granted.weights), ("promised_to_rows", 0)):
        (line,) = [line for line in lines if f'kind="{kind}"' in line]
        assert float(line.split()[-1]) == size
