"""Guards work in turns: short work is not behind long work, what is cancelled ends, and nothing outlives its step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import pytest

from selfdraft.server.errors import Loading, QueueFull
from selfdraft.server.stepper import Stepper


def held(most: int, body: Callable[[Stepper], Coroutine[Any, Any, None]]) -> None:
    """Run a test with a stepper."""
    stepper = Stepper("test", most)
    stepper.start()
    try:
        asyncio.run(asyncio.wait_for(body(stepper), 20))
    finally:
        stepper.stop()


def steps(count: int, seen: list[str], name: str) -> Generator[None, None, str]:
    for _ in range(count):
        yield
        seen.append(name)
    return name


def gated(gate: threading.Event, seen: list[str]) -> Generator[None, None, None]:
    """Each step waits for the gate."""
    try:
        for _ in range(1000):
            yield
            seen.append("step")
            gate.wait(10)
    finally:
        seen.append("closed")


def test_short_work_ends_before_long_work_that_came_first() -> None:
    async def body(stepper: Stepper) -> None:
        seen: list[str] = []
        long = asyncio.create_task(stepper.run(steps(200, seen, "long")))
        short = asyncio.create_task(stepper.run(steps(3, seen, "short")))
        assert await short == "short"
        assert await long == "long"
        assert seen.index("short") < 20
        assert len(seen) - seen[::-1].index("short") < 40

    held(8, body)


def test_work_runs_on_the_thread_and_its_error_is_told() -> None:
    def wrong() -> Generator[None, None, None]:
        yield
        raise ValueError(threading.current_thread().name)

    async def body(stepper: Stepper) -> None:
        with pytest.raises(ValueError, match="test"):
            await stepper.run(wrong())
        assert await stepper.run(steps(1, [], "next")) == "next"

    held(8, body)


def test_cancelled_work_is_over_when_its_caller_hears_of_it() -> None:
    async def body(stepper: Stepper) -> None:
        gate, seen = threading.Event(), list[str]()
        task = asyncio.create_task(stepper.run(gated(gate, seen)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()  # a step is running, with the model
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["step", "closed"]
        assert stepper.count == 0

    held(8, body)


def test_so_many_wait_and_no_more() -> None:
    async def body(stepper: Stepper) -> None:
        gate = threading.Event()
        tasks = [asyncio.create_task(stepper.run(gated(gate, []))) for _ in range(2)]
        await asyncio.sleep(0.02)
        with pytest.raises(QueueFull, match="2 requests for embeddings and scores run or wait"):
            await stepper.run(steps(1, [], "third"))
        gate.set()
        await asyncio.gather(*tasks)
        assert await stepper.run(steps(1, [], "third")) == "third"

    held(2, body)


def test_at_the_end_whoever_waits_is_told() -> None:
    async def body(stepper: Stepper) -> None:
        gate = threading.Event()
        tasks = [asyncio.create_task(stepper.run(gated(gate, []))) for _ in range(3)]
        await asyncio.sleep(0.02)
        threading.Timer(0.05, gate.set).start()
        await asyncio.to_thread(stepper.stop)
        for task in tasks:
            with pytest.raises(Loading, match="shutting down"):
                await task
        with pytest.raises(Loading):
            await stepper.run(steps(1, [], "late"))

    held(8, body)
