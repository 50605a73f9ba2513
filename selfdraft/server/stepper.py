"""Work on one thread of its own, a step of each piece of work in turn. Knows nothing of what the work is.

Long work does not hold up short work, none of it holds up the event loop or the engine, and what is cancelled ends
between two steps.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from ..engine import leave_tidily
from .errors import Loading, QueueFull

__all__ = ["Stepper"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY = 2.0  # seconds


@dataclass(eq=False)
class _Job:
    """A piece of work.

    Attributes:
        future: where its result goes, on `loop`.
        cancelled: nobody waits for it any more.
    """

    work: Generator[None, None, Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    cancelled: bool = False


class Stepper:
    """The thread.

    Args:
        name: of the thread.
        most: pieces of work that run and wait.
    """

    def __init__(self, name: str, most: int) -> None:
        self._most = most
        self._count = 0  # changed on the event loop
        self._mailbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._jobs: deque[_Job] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step that runs; whoever waits is told."""
        self._stopping = True
        self._mailbox.put(None)
        if self._thread.is_alive():
            self._thread.join(10)

    @property
    def count(self) -> int:
        """How many pieces of work run and wait."""
        return self._count

    def check_room(self) -> None:
        """Whether another may come: asked before anything is done for it, and again by `run`.

        Raises:
            QueueFull: too many run and wait. Loading: the thread is being stopped.
        """
        if self._stopping:
            raise Loading("the server is shutting down")
        if self._count >= self._most:
            raise QueueFull(
                f"{self._count} requests for embeddings and scores run or wait, and {self._most} are the most; try "
                "again later",
                retry_after=_RETRY,
            )

    async def run(self, work: Generator[None, None, T]) -> T:
        """The result of work. Cancelled, it returns when the step that runs is over: then nothing uses the model.

        Raises:
            QueueFull, Loading: see `check_room`.
            Exception: what the work raised.
        """
        self.check_room()
        loop = asyncio.get_running_loop()
        job = _Job(work, loop, loop.create_future())
        self._count += 1
        self._mailbox.put(job)
        try:
            result: T = await asyncio.shield(job.future)
            return result
        except asyncio.CancelledError:
            job.cancelled = True
            await asyncio.wait([job.future])
            job.future.exception()  # looked at, and of no interest
            raise
        finally:
            self._count -= 1

    # What follows runs on the thread.

    def _main(self) -> None:
        leave_tidily()
        while not self._stopping:
            self._receive()
            if self._jobs:
                job = self._jobs.popleft()
                if self._step(job):
                    self._jobs.append(job)
        self._receive(wait=False)
        for job in self._jobs:
            self._tell(job.loop, job.future.set_exception, Loading("the server is shutting down"))

    def _receive(self, *, wait: bool = True) -> None:
        """Take in what has come; sleep if there is nothing else to do."""
        while True:
            try:
                job = self._mailbox.get(block=wait and not self._jobs)
            except queue.Empty:
                return
            if job is None:
                return
            self._jobs.append(job)

    def _step(self, job: _Job) -> bool:
        """A step of a job; whether there is another."""
        if job.cancelled:
            job.work.close()
            self._tell(job.loop, job.future.set_result, None)
            return False
        try:
            next(job.work)
        except StopIteration as end:
            self._tell(job.loop, job.future.set_result, end.value)
        except Exception as error:
            self._tell(job.loop, job.future.set_exception, error)
        else:
            return True
        return False

    def _tell(self, loop: asyncio.AbstractEventLoop, how: Callable[[Any], object], what: object) -> None:
        try:
            loop.call_soon_threadsafe(how, what)
        except RuntimeError:  # the loop was closed: nobody waits any more
            log.debug("a result had no reader")
