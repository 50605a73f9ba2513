"""Things that are loaded on request, as many as fit: which are there, who waits, what gives way. Knows nothing of them.

All of it happens on one event loop; what opens and closes a thing runs on a thread beside it. One thing is opened at a
time, so that nobody else takes the memory that it was promised.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from ..errors import OutOfMemoryBudget
from ..memory import gibibytes
from .errors import Loading, NoRoom, QueueFull

__all__ = ["STAY", "Entry", "Lease", "Pool", "State"]

log = logging.getLogger(__name__)

T = TypeVar("T")

State = Literal["unloaded", "loading", "loaded", "unloading"]

STAY = math.inf
"""To stay until room is needed: see `Pool.use`."""

_PATIENCE = 300.0  # seconds that a load waits for those to end that hold what must give way
_SHUTDOWN = 10.0  # seconds that the end waits for what is being opened or closed


@dataclass(frozen=True, eq=False)
class Entry(Generic[T]):
    """Something that can be loaded.

    Attributes:
        name: its own, in the pool and in messages.
        size: bytes that it will take, asked before it is opened; on a thread, since files may have to be looked at.
        open: makes it, on a thread.
        close: gives all that it holds back, on a thread; it is not used by then.
        held: bytes that it holds now; by default its size. Asked from any thread, so it must not wait.
        pinned: whether it stays once it is loaded.
    """

    name: str
    size: Callable[[], int]
    open: Callable[[], T]
    close: Callable[[T], object]
    held: Callable[[T], int] | None = None
    pinned: bool = False


class Lease(Generic[T]):
    """The right to use a thing: as long as somebody holds one, it stays. Release it on the event loop.

    Attributes:
        thing: what was asked for.
    """

    def __init__(self, thing: T, release: Callable[[], None]) -> None:
        self.thing = thing
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Give it back; a second time does nothing."""
        if self._release is not None:
            release, self._release = self._release, None
            release()

    def __enter__(self) -> T:
        return self.thing

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(eq=False)
class _Slot:
    """What became of an entry.

    Attributes:
        size: of the thing; 0 before it was ever asked.
        leases: how many hold it.
        waiting: those that want it, in the order in which they came, each with the seconds it may stay idle.
        leaving: whether it must give way: newcomers wait until it is loaded again.
        used: clock time of the last lease's end; of no meaning while there are leases.
        stay: seconds that it may stay idle.
        timer: ends that time.
        loads, unloads, failures: how often it was loaded, unloaded, and could not be loaded.
        failure: why it could not be loaded, the last time it was tried.
    """

    entry: Entry[Any]
    state: State = "unloaded"
    thing: Any = None
    size: int = 0
    leases: int = 0
    waiting: deque[tuple[asyncio.Future[Lease[Any]], float]] = field(default_factory=deque)
    leaving: bool = False
    used: float = 0.0
    stay: float = STAY
    timer: asyncio.TimerHandle | None = None
    loads: int = 0
    unloads: int = 0
    failures: int = 0
    failure: str | None = None

    @property
    def held(self) -> int:
        """Bytes that it holds, or is about to."""
        thing = self.thing
        if self.state == "unloaded":
            return 0
        return self.size if thing is None or self.entry.held is None else self.entry.held(thing)

    @property
    def wanted(self) -> bool:
        """Whether anybody waits for it still."""
        return any(not future.done() for future, _ in self.waiting)


class Pool:
    """Things by name, loaded when they are asked for.

    Args:
        free: bytes that a newcomer could take now, beside what is loaded.
        most_loaded: how many may be there at once; None for as many as fit.
        idle_ttl: seconds without a lease after which a thing is unloaded, unless `use` names others.
        most_waiting: how many may wait for things that are not there.
        patience: seconds that a load waits for the end of leases on what must give way to it.

    Attributes:
        beside: another pool on the same memory: what is idle there gives way, too.
    """

    def __init__(
        self,
        free: Callable[[], int],
        *,
        most_loaded: int | None = None,
        idle_ttl: float = STAY,
        most_waiting: int = 64,
        patience: float = _PATIENCE,
    ) -> None:
        self.beside: Pool | None = None
        self._free = free
        self._most_loaded = most_loaded or STAY
        self._idle_ttl = idle_ttl
        self._most_waiting = most_waiting
        self._patience = patience
        self._slots: dict[str, _Slot] = {}
        self._wanted: deque[_Slot] = deque()  # to be loaded, in turn
        self._moving = asyncio.Lock()  # held while something is opened or closed
        self._changed = asyncio.Event()  # set when a lease ends, or somebody waits no more
        self._tasks: set[asyncio.Task[None]] = set()
        self._loader: asyncio.Task[None] | None = None
        self._closed = False

    def add(self, entry: Entry[Any]) -> None:
        """Make it known; nothing is loaded."""
        if entry.name in self._slots:
            raise ValueError(f"there is a {entry.name!r} already")
        self._slots[entry.name] = _Slot(entry)

    async def use(self, entry: Entry[T], *, stay: float | None = None) -> Lease[T]:
        """Have a thing, which is loaded first if it is not there; whoever gets the lease releases it.

        Args:
            entry: one that was added.
            stay: seconds that it may stay idle afterwards: 0 unloads it at once, `STAY` leaves it until room is needed;
                None is the pool's `idle_ttl`. The newest lease decides.

        Raises:
            QueueFull: too many wait.
            OutOfMemoryBudget: it does not fit, even if all that may give way does.
            NoRoom: what must give way was in use for too long.
            Loading: the pool is closed.
            Exception: what `open` raised; the next call tries again.
        """
        slot = self._slots[entry.name]
        stay = self._idle_ttl if stay is None else stay
        if self._closed:
            raise Loading("the server is shutting down")
        if slot.state == "loaded" and not slot.leaving:
            return self._lease(slot, stay)
        if self.waiting >= self._most_waiting:
            raise QueueFull(f"{self.waiting} requests wait for models already; try again later", retry_after=5)
        future: asyncio.Future[Lease[T]] = asyncio.get_running_loop().create_future()
        slot.waiting.append((future, stay))
        self._want(slot)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()  # it came and went at the same moment
            future.cancel()
            self._changed.set()
            raise

    def state(self, name: str) -> State:
        """What has become of a thing."""
        return self._slots[name].state

    def thing(self, entry: Entry[T]) -> T | None:
        """A thing, to look at, if it is loaded."""
        found: T | None = self._slots[entry.name].thing
        return found

    def failure(self, name: str) -> str | None:
        """Why it could not be loaded when that was last tried; None if it could."""
        return self._slots[name].failure

    def counts(self, name: str) -> dict[str, int]:
        """How often it was loaded, unloaded, and could not be loaded."""
        slot = self._slots[name]
        return {"loads": slot.loads, "unloads": slot.unloads, "failures": slot.failures}

    @property
    def waiting(self) -> int:
        """How many wait for things."""
        return sum(not future.done() for slot in self._slots.values() for future, _ in slot.waiting)

    def held(self, *, but: str | None = None) -> int:
        """Bytes that the things hold, except that of one name. From any thread."""
        return sum(slot.held for name, slot in list(self._slots.items()) if name != but)

    def drain(self) -> None:
        """Take no more: whoever waits is told."""
        self._closed = True
        for slot in self._slots.values():
            self._answer(slot, Loading("the server is shutting down"))
        self._changed.set()

    async def close(self) -> None:
        """Unload everything, and take no more. What is being opened is not waited for long."""
        self.drain()
        if running := [task for task in (*self._tasks, self._loader) if task is not None and not task.done()]:
            await asyncio.wait(running, timeout=_SHUTDOWN)
        for slot in self._slots.values():
            if slot.state == "loaded":
                await self._unload(slot)

    # Leases.

    def _lease(self, slot: _Slot, stay: float) -> Lease[Any]:
        slot.leases += 1
        slot.stay = stay
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None
        return Lease(slot.thing, lambda: self._released(slot))

    def _released(self, slot: _Slot) -> None:
        slot.leases -= 1
        slot.used = time.monotonic()
        self._changed.set()
        self._rest(slot)

    def _rest(self, slot: _Slot) -> None:
        """Have it unloaded when it was idle for long enough."""
        if slot.leases or slot.entry.pinned or self._closed or slot.stay == STAY:
            return
        idle_since = slot.used
        loop = asyncio.get_running_loop()
        slot.timer = loop.call_later(slot.stay, lambda: self._start(self._expire(slot, idle_since)))

    async def _expire(self, slot: _Slot, idle_since: float) -> None:
        async with self._moving:
            if slot.state == "loaded" and not slot.leases and slot.used == idle_since:
                await self._unload(slot)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Loading, one after the other.

    def _want(self, slot: _Slot) -> None:
        if slot not in self._wanted:
            self._wanted.append(slot)
        if self._loader is None or self._loader.done():
            self._loader = asyncio.get_running_loop().create_task(self._load_all())

    async def _load_all(self) -> None:
        while self._wanted and not self._closed:
            slot = self._wanted[0]
            try:
                await self._load(slot)
            except Exception as error:
                self._answer(slot, error)
            self._wanted.popleft()

    async def _load(self, slot: _Slot) -> None:
        """Load what a slot is for, if anybody waits for it still, and give it to them."""
        if slot.state != "loaded":
            slot.size = await self._tried(slot, slot.entry.size)
            if not await self._make_room(slot):
                slot.waiting.clear()
                return
            try:
                await self._open(slot)
                if self._closed:
                    await self._unload(slot)
            finally:
                self._moving.release()
        for future, stay in slot.waiting:
            if not future.done():
                future.set_result(self._lease(slot, stay))
        slot.waiting.clear()
        self._rest(slot)

    async def _open(self, slot: _Slot) -> None:
        log.info("loading %s (%s)", slot.entry.name, gibibytes(slot.size))
        begun = time.monotonic()
        slot.state = "loading"
        try:
            slot.thing = await self._tried(slot, slot.entry.open)
        except BaseException:
            slot.state = "unloaded"
            raise
        slot.state, slot.failure = "loaded", None
        slot.loads += 1
        slot.used, slot.stay = time.monotonic(), self._idle_ttl
        log.info("loaded %s in %.1f s", slot.entry.name, slot.used - begun)

    async def _tried(self, slot: _Slot, work: Callable[[], T]) -> T:
        """A part of loading, whose failure is remembered."""
        try:
            return await _aside(work)
        except Exception as error:
            slot.failures += 1
            slot.failure = f"{type(error).__name__}: {error}"
            log.error("%s could not be loaded: %s", slot.entry.name, slot.failure)
            raise

    async def _unload(self, slot: _Slot) -> None:
        thing, slot.thing, slot.state = slot.thing, None, "unloading"
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None
        try:
            await _aside(slot.entry.close, thing)
        except Exception:
            log.exception("%s did not close as it should", slot.entry.name)
        slot.state, slot.leaving = "unloaded", False
        slot.unloads += 1
        log.info("unloaded %s", slot.entry.name)

    def _answer(self, slot: _Slot, error: Exception) -> None:
        for future, _ in slot.waiting:
            if not future.done():
                future.set_exception(error)
        slot.waiting.clear()

    # Room.

    async def _make_room(self, slot: _Slot) -> bool:
        """Unload what must give way. What is in use may end first, but takes no newcomers: else it might never end.

        Returns:
            Whether there is room, and anybody who waits for it. Then `_moving` is held.
        """
        end = time.monotonic() + self._patience
        try:
            while slot.wanted and not self._closed:
                await self._have_room_beside(slot)
                await self._moving.acquire()
                try:
                    in_the_way = self._in_the_way(slot)
                    for each in self._slots.values():
                        each.leaving = each in in_the_way
                    for each in [each for each in in_the_way if not each.leases]:
                        await self._unload(each)
                except BaseException:
                    self._moving.release()
                    raise
                if not in_the_way:
                    return True
                self._moving.release()
                await self._await_change(slot, [each for each in in_the_way if each.leases], end)
            return False
        finally:
            for each in self._slots.values():
                each.leaving = False

    async def _have_room_beside(self, slot: _Slot) -> None:
        """Have idle things of the other pool give way, where those of this one are too few and both are enough.

        Not while `_moving` is held: the other pool may be about to ask the same of this one.
        """
        if self.beside is None:
            return
        own = [each for each in self._slots.values() if each.state == "loaded" and not each.entry.pinned]
        lacking = slot.size - self._free()
        least = lacking - sum(each.held for each in own)
        if least <= sum(each.held for each in self.beside._idle):
            await self.beside._give_way(lacking - sum(each.held for each in own if not each.leases))

    async def _give_way(self, lacking: int) -> None:
        """Unload what is idle until so many bytes are there."""
        if lacking <= 0:
            return
        async with self._moving:
            while lacking > 0 and (idle := self._idle):
                lacking -= idle[0].held
                await self._unload(idle[0])

    @property
    def _idle(self) -> list[_Slot]:
        """What nobody uses, the least recently used first."""
        loaded = [each for each in self._slots.values() if each.state == "loaded"]
        return sorted(
            (each for each in loaded if not each.leases and not each.entry.pinned), key=lambda each: each.used
        )

    async def _await_change(self, slot: _Slot, busy: Sequence[_Slot], end: float) -> None:
        """Wait for the end of a lease on one of the busy ones."""
        if not busy:
            return
        self._changed.clear()
        try:
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                await self._changed.wait()
        except TimeoutError:
            names = ", ".join(each.entry.name for each in busy)
            raise NoRoom(
                f"{slot.entry.name} needs the room of {names}, in use for {self._patience:g} s and longer; try again "
                "later",
                retry_after=30,
            ) from None

    def _in_the_way(self, slot: _Slot) -> list[_Slot]:
        """What must give way: idle ones first, then those that were told to already; the least recently used first.

        Raises:
            OutOfMemoryBudget: that would not be enough.
        """
        others = [each for each in self._slots.values() if each.state == "loaded"]
        lacking = slot.size - self._free()
        too_many = len(others) + 1 - self._most_loaded
        found: list[_Slot] = []
        for each in sorted(others, key=lambda each: (each.leases > 0, not each.leaving, each.used)):
            if lacking <= 0 and too_many <= 0:
                break
            if not each.entry.pinned:
                found.append(each)
                lacking -= each.held
                too_many -= 1
        if lacking > 0 or too_many > 0:
            raise _never(slot, lacking, too_many)
        return found


def _never(slot: _Slot, lacking: float, too_many: float) -> OutOfMemoryBudget:
    if lacking > 0:
        return OutOfMemoryBudget(
            f"{slot.entry.name} needs {gibibytes(slot.size)}, {gibibytes(lacking)} more than is free, even without the "
            "other models: close other programs, raise memory_limit, or take a smaller or a quantised model",
            later=True,
        )
    return OutOfMemoryBudget(
        f"{slot.entry.name} cannot be loaded beside models that are pinned: raise max_loaded_models", later=True
    )


async def _aside(work: Callable[..., T], *args: Any) -> T:
    """The result of work on a thread of its own, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(how: Callable[[Any], None], what: object) -> None:
        try:
            loop.call_soon_threadsafe(lambda: None if future.done() else how(what))
        except RuntimeError:
            log.debug("the event loop ended before %s did", work)

    def run() -> None:
        try:
            result = work(*args)
        except BaseException as error:
            tell(future.set_exception, error)
        else:
            tell(future.set_result, result)

    threading.Thread(target=run, name="pool", daemon=True).start()
    return await future
