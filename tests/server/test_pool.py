"""Guards the pool: loaded once, never taken from its users, what was idle longest gives way, nobody waits for ever."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from selfdraft.errors import OutOfMemoryBudget, SelfdraftError
from selfdraft.server.errors import Loading, NoRoom, QueueFull
from selfdraft.server.pool import STAY, Entry, Pool

_WHILE = 0.05  # seconds: enough for what should not happen


class Thing:
    """Something that must not be used when it is closed."""

    def __init__(self, shelf: Shelf, name: str) -> None:
        self.name = name
        self.open = True
        self.users = 0
        self._shelf = shelf

    def close(self) -> None:
        assert self.users == 0, f"{self.name} is taken from whoever uses it"
        self._shelf.used -= self._shelf.sizes[self.name]
        self._shelf.closed.append(self.name)
        self.open = False


class Shelf:
    """Entries of a pool, in a memory of a hundred bytes; `gates` hold their opening back."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        self.used = 0
        self.most_used = 0
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.failing: dict[str, Exception] = {}
        self.entries = {name: self._entry(name) for name in sizes}

    def _entry(self, name: str, *, pinned: bool = False) -> Entry[Thing]:
        return Entry(name, lambda: self.sizes[name], lambda: self._open(name), Thing.close, pinned=pinned)

    def pin(self, name: str) -> None:
        self.entries[name] = self._entry(name, pinned=True)

    def _open(self, name: str) -> Thing:
        self.opened.append(name)
        if name in self.gates:
            assert self.gates[name].wait(20)
        if name in self.failing:
            raise self.failing[name]
        self.used += self.sizes[name]
        self.most_used = max(self.most_used, self.used)
        return Thing(self, name)

    def pool(self, **options: Any) -> Pool:
        pool = Pool(lambda: 100 - pool.held(), **options)
        for entry in self.entries.values():
            pool.add(entry)
        return pool


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def timed() -> None:
        async with asyncio.timeout(30):
            await scenario

    asyncio.run(timed())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.002)


def test_requests_at_the_same_time_load_it_once_and_share_it() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=10)
        shelf.gates["a"] = threading.Event()
        pool = shelf.pool()
        asked = [asyncio.create_task(pool.use(shelf.entries["a"])) for _ in range(5)]
        await until(lambda: pool.state("a") == "loading")
        await asyncio.sleep(_WHILE)
        shelf.gates["a"].set()
        things = {lease.thing for lease in await asyncio.gather(*asked)}
        again = await pool.use(shelf.entries["a"])
        assert things == {again.thing}
        assert shelf.opened == ["a"]
        assert pool.counts("a") == {"loads": 1, "unloads": 0, "failures": 0}

    run(scenario())


def test_the_loop_goes_on_while_something_is_opened() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=10, b=10)
        shelf.gates["b"] = threading.Event()
        pool = shelf.pool()
        first = await pool.use(shelf.entries["a"])
        slow = asyncio.create_task(pool.use(shelf.entries["b"]))
        await until(lambda: pool.state("b") == "loading")
        first.release()
        with await pool.use(shelf.entries["a"]) as thing:  # what is there is had at once
            assert thing.open
        assert not slow.done()
        shelf.gates["b"].set()
        (await slow).release()

    run(scenario())


def test_the_least_recently_used_one_gives_way_and_only_as_many_as_must() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=40, b=30, c=30, d=50)
        pool = shelf.pool()
        for name in ("a", "b", "c", "a"):
            (await pool.use(shelf.entries[name])).release()
        (await pool.use(shelf.entries["d"])).release()
        assert shelf.closed == ["b", "c"]
        assert [pool.state(name) for name in "abcd"] == ["loaded", "unloaded", "unloaded", "loaded"]
        assert shelf.used == pool.held() == 90

    run(scenario())


def test_at_most_so_many_are_loaded() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=1, b=1, c=1)
        pool = shelf.pool(most_loaded=2)
        for name in "abcab":
            (await pool.use(shelf.entries[name])).release()
        assert shelf.closed == ["a", "b", "c"]

    run(scenario())


def test_what_is_in_use_stays_until_it_is_released() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=60, b=60)
        pool = shelf.pool()
        lease = await pool.use(shelf.entries["a"])
        lease.thing.users += 1
        other = asyncio.create_task(pool.use(shelf.entries["b"]))
        await asyncio.sleep(_WHILE)
        assert shelf.opened == ["a"]
        lease.thing.users -= 1
        lease.release()
        assert (await other).thing.name == "b"
        assert shelf.most_used == 60

    run(scenario())


def test_newcomers_do_not_keep_a_load_waiting_for_ever() -> None:
    """Two that are always in use, in turns of overlapping requests, both have to let a third one in."""

    async def scenario() -> None:
        shelf = Shelf(a=50, b=50, c=100)
        pool = shelf.pool()
        ended = asyncio.Event()

        async def crowd(name: str) -> None:
            while not ended.is_set():
                with await pool.use(shelf.entries[name]):
                    await asyncio.sleep(0.01)

        crowds = [asyncio.create_task(crowd(name)) for name in "ababab" for _ in range(2)]
        await until(lambda: shelf.opened.count("a") == shelf.opened.count("b") == 1)
        async with asyncio.timeout(5):
            (await pool.use(shelf.entries["c"])).release()
        ended.set()
        await asyncio.gather(*crowds)

    run(scenario())


def test_a_load_that_waits_in_vain_says_for_whom_and_the_others_go_on() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=60, b=60)
        pool = shelf.pool(patience=0.05)
        lease = await pool.use(shelf.entries["a"])
        with pytest.raises(NoRoom, match="b needs the room of a, in use"):
            await pool.use(shelf.entries["b"])
        with await pool.use(shelf.entries["a"]) as thing:
            assert thing is lease.thing
        lease.release()
        (await pool.use(shelf.entries["b"])).release()

    run(scenario())


def test_what_can_never_fit_is_refused_at_once_and_nothing_is_unloaded_for_it() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=40, b=101, c=70)
        shelf.pin("a")
        pool = shelf.pool()
        (await pool.use(shelf.entries["a"])).release()
        for name in "bc":
            with pytest.raises(OutOfMemoryBudget, match=f"{name} needs") as refused:
                await pool.use(shelf.entries[name])
            assert refused.value.later
        assert shelf.opened == ["a"]
        assert shelf.closed == []

    run(scenario())


def test_a_pinned_one_keeps_its_place_among_the_most() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=1, b=1)
        shelf.pin("a")
        pool = shelf.pool(most_loaded=1, idle_ttl=0)
        (await pool.use(shelf.entries["a"], stay=0)).release()
        with pytest.raises(OutOfMemoryBudget, match="pinned"):
            await pool.use(shelf.entries["b"])
        assert pool.state("a") == "loaded"

    run(scenario())


def test_a_load_that_fails_tells_all_that_wait_and_is_tried_again() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=10, b=10)
        shelf.gates["a"] = threading.Event()
        shelf.failing["a"] = SelfdraftError("the disk is gone")
        pool = shelf.pool()
        asked = [asyncio.create_task(pool.use(shelf.entries["a"])) for _ in range(3)]
        await until(lambda: pool.state("a") == "loading")
        shelf.gates["a"].set()
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(error) for error in told] == ["the disk is gone"] * 3
        assert pool.failure("a") == "SelfdraftError: the disk is gone"
        assert (pool.state("a"), pool.held()) == ("unloaded", 0)
        (await pool.use(shelf.entries["b"])).release()
        shelf.failing.clear()
        (await pool.use(shelf.entries["a"])).release()
        assert pool.failure("a") is None
        assert pool.counts("a") == {"loads": 1, "unloads": 0, "failures": 1}

    run(scenario())


def test_a_size_that_cannot_be_told_is_a_failure_too() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=10)
        pool = shelf.pool()
        del shelf.sizes["a"]
        with pytest.raises(KeyError):
            await pool.use(shelf.entries["a"])
        shelf.sizes["a"] = 10
        (await pool.use(shelf.entries["a"])).release()

    run(scenario())


def test_so_many_wait_and_no_more() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=10, b=10)
        shelf.gates["a"] = threading.Event()
        pool = shelf.pool(most_waiting=2)
        asked = [asyncio.create_task(pool.use(shelf.entries[name])) for name in "ab"]
        await until(lambda: pool.waiting == 2)
        with pytest.raises(QueueFull, match="2 requests wait"):
            await pool.use(shelf.entries["a"])
        shelf.gates["a"].set()
        for lease in await asyncio.gather(*asked):
            lease.release()
        assert pool.waiting == 0

    run(scenario())


def test_whoever_gives_up_is_not_waited_for() -> None:
    """While it waits for room nothing is loaded for it, and what should have given way takes requests again."""

    async def scenario() -> None:
        shelf = Shelf(a=60, b=60, c=10)
        pool = shelf.pool()
        lease = await pool.use(shelf.entries["a"])
        given_up = asyncio.create_task(pool.use(shelf.entries["b"]))
        behind = asyncio.create_task(pool.use(shelf.entries["c"]))
        await asyncio.sleep(_WHILE)
        newcomer = asyncio.create_task(pool.use(shelf.entries["a"]))
        await asyncio.sleep(_WHILE)
        assert not newcomer.done()
        given_up.cancel()
        assert (await newcomer).thing is lease.thing
        (await behind).release()
        assert shelf.opened == ["a", "c"]

    run(scenario())


def test_whoever_gives_up_while_it_is_opened_leaves_it_idle() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=60, b=60)
        shelf.gates["a"] = threading.Event()
        pool = shelf.pool()
        given_up = asyncio.create_task(pool.use(shelf.entries["a"]))
        await until(lambda: pool.state("a") == "loading")
        given_up.cancel()
        shelf.gates["a"].set()
        await until(lambda: pool.state("a") == "loaded")
        (await pool.use(shelf.entries["b"])).release()
        assert shelf.closed == ["a"]

    run(scenario())


def test_a_lease_that_comes_as_its_taker_goes_is_given_back() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=60, b=60)
        pool = shelf.pool()
        taker = asyncio.create_task(pool.use(shelf.entries["a"]))
        pool._rest = lambda slot: taker.cancel()  # type: ignore[assignment, method-assign]  # its lease is on its way
        with suppress(asyncio.CancelledError):
            await taker
        assert taker.cancelled()
        (await pool.use(shelf.entries["b"])).release()
        assert shelf.closed == ["a"]

    run(scenario())


def test_idle_ones_are_unloaded_after_a_while_and_the_newest_request_says_how_long() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=10, b=10, c=10)
        pool = shelf.pool(idle_ttl=0.1)
        begun = time.monotonic()
        (await pool.use(shelf.entries["a"])).release()
        (await pool.use(shelf.entries["b"], stay=STAY)).release()
        (await pool.use(shelf.entries["c"], stay=0)).release()
        await until(lambda: pool.state("c") == "unloaded")
        assert pool.state("a") == "loaded"
        await until(lambda: pool.state("a") == "unloaded")
        assert time.monotonic() - begun >= 0.1
        assert pool.state("b") == "loaded"
        (await pool.use(shelf.entries["b"])).release()
        await until(lambda: pool.state("b") == "unloaded")

    run(scenario())


def test_time_in_use_is_not_idle_time() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=10)
        pool = shelf.pool(idle_ttl=0.05)
        first = await pool.use(shelf.entries["a"])
        second = await pool.use(shelf.entries["a"])
        first.release()
        first.release()  # once is enough
        await asyncio.sleep(0.15)
        assert pool.state("a") == "loaded"
        second.release()
        await until(lambda: pool.state("a") == "unloaded")

    run(scenario())


def test_the_end_unloads_everything_and_tells_who_waits() -> None:
    async def scenario() -> None:
        shelf = Shelf(a=10, b=10, c=10)
        shelf.gates["b"] = threading.Event()
        pool = shelf.pool()
        (await pool.use(shelf.entries["a"])).release()
        asked = [asyncio.create_task(pool.use(shelf.entries[name])) for name in "bc"]
        await until(lambda: pool.state("b") == "loading")
        ending = asyncio.create_task(pool.close())
        for task in asked:
            with pytest.raises(Loading, match="shutting down"):
                await task
        shelf.gates["b"].set()
        await ending
        with pytest.raises(Loading, match="shutting down"):
            await pool.use(shelf.entries["a"])
        assert sorted(shelf.closed) == ["a", "b"]
        assert shelf.used == 0

    run(scenario())


def test_one_that_does_not_close_well_is_gone_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        shelf = Shelf(a=60, b=60)
        shelf.entries["a"] = Entry("a", lambda: 60, lambda: 1, lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
        pool = shelf.pool()
        (await pool.use(shelf.entries["a"])).release()
        (await pool.use(shelf.entries["b"])).release()
        assert pool.state("a") == "unloaded"

    run(scenario())
    assert "a did not close as it should" in caplog.text


@pytest.mark.parametrize("seed", range(4))
def test_under_load_nothing_is_used_that_is_closed_and_memory_is_kept_to(seed: int) -> None:
    """Requests, cancellations, failures and idle times at random: every thing used is open, and all come to an end."""

    async def scenario() -> None:
        chance = random.Random(seed)
        shelf = Shelf(a=50, b=40, c=30, d=60, e=90)
        pool = shelf.pool(most_loaded=3, idle_ttl=0.02, most_waiting=1000)
        served: list[str] = []

        async def request() -> None:
            name = chance.choice("abcde")
            await asyncio.sleep(chance.random() * 0.5)
            with await pool.use(shelf.entries[name], stay=chance.choice([None, 0, 0.01, STAY])) as thing:
                thing.users += 1
                try:
                    assert thing.open
                    await asyncio.sleep(chance.random() * 0.01)
                    assert thing.open
                    served.append(name)
                finally:
                    thing.users -= 1

        async def one() -> None:
            task = asyncio.create_task(request())
            if chance.random() < 0.2:
                await asyncio.sleep(chance.random() * 0.5)
                task.cancel()
            if chance.random() < 0.1:
                shelf.failing[chance.choice("abcde")] = SelfdraftError("broken")
                await asyncio.sleep(0.01)
                shelf.failing.clear()
            with suppress(asyncio.CancelledError, SelfdraftError):
                await task

        await asyncio.gather(*(one() for _ in range(200)))
        assert len(served) > 100
        assert shelf.most_used <= 100
        await pool.close()
        assert shelf.used == 0

    run(scenario())


def test_what_is_idle_in_the_pool_beside_gives_way() -> None:
    async def scenario() -> None:
        shelf, others = Shelf(a=60, b=90), Shelf(x=30, y=30)
        pool = Pool(lambda: 100 - pool.held() - beside.held())
        beside = Pool(lambda: 100 - pool.held() - beside.held())
        pool.beside, beside.beside = beside, pool
        for entry in shelf.entries.values():
            pool.add(entry)
        for entry in others.entries.values():
            beside.add(entry)
        (await beside.use(others.entries["x"])).release()
        held = await beside.use(others.entries["y"])
        with pytest.raises(OutOfMemoryBudget):
            await pool.use(shelf.entries["b"])
        assert others.closed == []  # y is in use, and x alone would not be enough
        (await pool.use(shelf.entries["a"])).release()
        assert others.closed == ["x"]
        held.release()
        (await pool.use(shelf.entries["b"])).release()
        assert (others.closed, shelf.closed) == (["x", "y"], ["a"])

        async def used(pool: Pool, entry: Entry[Thing]) -> None:
            with suppress(OutOfMemoryBudget), await pool.use(entry):
                await asyncio.sleep(0)

        turns = [(beside, others.entries["x"]), (pool, shelf.entries["a"]), (beside, others.entries["y"])]
        await asyncio.gather(*(used(*turn) for turn in 5 * turns))  # each asks the other one: neither waits for ever
        await pool.close()
        await beside.close()

    run(scenario())


def test_enough_gives_way_beside_and_no_more() -> None:
    async def scenario() -> None:
        shelf, others = Shelf(a=60), Shelf(x=30, y=30, z=30)
        pool = Pool(lambda: 100 - beside.held())
        beside = others.pool()
        pool.beside = beside
        pool.add(shelf.entries["a"])
        for name in ("y", "x", "z"):
            (await beside.use(others.entries[name])).release()
        (await pool.use(shelf.entries["a"])).release()
        assert others.closed == ["y", "x"]
        await pool.close()
        await beside.close()

    run(scenario())
