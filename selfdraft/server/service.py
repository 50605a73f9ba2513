"""The engine on a thread of its own: answers go in, pieces come out. Knows nothing of HTTP or of chats.

Everything that touches the model happens on that thread; the rest of the server talks to it through a mailbox. Rows run
side by side up to a limit, further answers wait in a bounded queue, and none is admitted whose memory is not there.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..budget import Need, together
from ..engine import leave_tidily
from ..errors import InvalidRequest, SelfdraftError
from ..keeping import DiskSessions
from ..llm import LLM
from ..results import Piece
from ..stream import Answer
from .errors import Loading, QueueFull
from .metrics import Metrics

__all__ = ["EngineService", "Ticket"]

log = logging.getLogger(__name__)

Received = Piece | Exception

_DISK_SECONDS = 3.0  # that the first request may wait for what is on disk; weights never seen before take longer
_IDLE_SECONDS = 10.0  # without a row, after which MLX's spare buffers are given back
_TIDY_SECONDS = 60.0  # between looks at what an idle server could let go

_NO_MODEL = "there is no model to answer with; the server's log says why"


@dataclass(eq=False)
class Ticket:
    """One answer on its way through the service.

    Attributes:
        answer: the row and its text; touched by the engine's thread only.
        index: its place among the answers submitted with it.
        need: memory it is expected to need.
        received: where its pieces go, each with `index`; shared by the answers submitted together. A piece with a
            result, or an exception, is the last.
        submitted, last_piece: clock times.
        drafts_tried, drafts_accepted: what the metrics have of them, by position.
    """

    answer: Answer
    index: int
    need: Need
    loop: asyncio.AbstractEventLoop
    received: asyncio.Queue[tuple[int, Received]]
    submitted: float = field(default_factory=time.perf_counter)
    last_piece: float | None = None
    drafts_tried: Sequence[int] = ()
    drafts_accepted: Sequence[int] = ()


class EngineService:
    """Owns a model and the thread that runs it.

    Args:
        load: makes the model; called on the engine's thread.
        rows: most answers that run side by side.
        waiting: most answers that wait for a place.
        metrics: where counts go.
        owners: how many API keys share the session cache.

    Attributes:
        disk: warm prefixes on disk; None as long as there is no model.
        beyond_repair: asked when the engine broke off: why nothing can be decoded any more, if that is so.
    """

    def __init__(
        self,
        load: Callable[[], LLM],
        *,
        rows: int,
        waiting: int,
        metrics: Metrics,
        owners: int = 1,
    ) -> None:
        self._load = load
        self._owners = owners
        self._most_rows = rows
        self._most_waiting = waiting
        self._mailbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._waiting: deque[Ticket] = deque()
        self._running: list[Ticket] = []
        self._admitted = 0  # waiting and running, counted where answers are submitted
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._llm: LLM | None = None
        self.disk: DiskSessions | None = None
        self.beyond_repair: Callable[[], SelfdraftError | None] = lambda: None
        self.metrics = metrics
        metrics.watch(lambda: self.session_figures)
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin to load the model; in time it is `ready`, or `failure` says why not."""
        self._thread.start()

    @property
    def llm(self) -> LLM:
        """The model.

        Raises:
            Loading: it is not there yet, or could not be loaded.
        """
        if self._llm is None:
            if self.failure is not None:
                raise Loading(_NO_MODEL)
            raise Loading("the model is still being loaded; try again in a moment")
        return self._llm

    def check_room(self, answers: int) -> None:
        """Whether so many more may run or wait: asked before any work for them, and again by `submit`.

        Raises:
            InvalidRequest, QueueFull, Loading: see `submit`.
        """
        most = self._most_rows + self._most_waiting
        if answers > most:
            raise InvalidRequest(
                f"the request asks for {answers} answers, and {most} are the most that run or wait here: ask for "
                "fewer prompts or a lower n",
                param="n",
            )
        if self.failure is not None:
            raise Loading(_NO_MODEL)
        if self._stopping:
            raise Loading("the server is shutting down")
        if self._admitted + answers > most:
            self.metrics.refused.inc(answers)
            raise QueueFull(
                f"{self._admitted} answers run or wait, and {most} are the most; try again later",
                retry_after=self._retry_after(),
            )

    def submit(self, answers: Sequence[Answer]) -> list[Ticket]:
        """Queue answers, all or none. Call on the event loop.

        Raises:
            InvalidRequest: more answers than could ever wait together.
            QueueFull: too many answers wait already.
            OutOfMemoryBudget: they would need more memory than there is.
            Loading: there is no model yet.
        """
        llm = self.llm
        fitted = [llm.budget.fitted(answer.request, spare=llm.session_bytes) for answer in answers]
        with self._lock:
            self.check_room(len(answers))
            self._admitted += len(answers)
            for answer, (request, _) in zip(answers, fitted, strict=True):
                answer.request = request
            loop, received = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Received]]()
            tickets = [
                Ticket(answer, index, need, loop, received)
                for index, (answer, (_, need)) in enumerate(zip(answers, fitted, strict=True))
            ]
            self._mailbox.put(lambda: self._waiting.extend(tickets))  # before the thread hears of an end
        return tickets

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Give answers up: their rows are free at the next cycle, or between two layers of a prefill."""
        for ticket in tickets:
            ticket.answer.give_up()
        self._mailbox.put(lambda: self._drop(tickets))

    def drain(self) -> None:
        """Take no more answers; the thread ends with the last of those there are."""
        with self._lock:
            self._stopping = True
        self._mailbox.put(lambda: None)  # it may sleep

    def stop(self) -> None:
        """Cancel what runs and waits, and end the thread."""
        self.drain()
        self._mailbox.put(lambda: self._drop([*self._waiting, *self._running]))
        # A model that is still being loaded is not waited for any longer, and a thread that hangs not at all.
        self._thread.join(10 if self.failure is None else 1)
        if self.disk is not None:
            self.disk.close()
        self._give_fans_back()

    def fail(self, error: SelfdraftError) -> None:
        """End everything with an error, from another thread: the engine's waits for what never comes."""
        self.failure = error
        self._fail_all(error)

    @property
    def ready(self) -> bool:
        """Whether the model is there."""
        return self._llm is not None and self.failure is None

    @property
    def busy(self) -> bool:
        """Whether an answer runs or waits."""
        return self._admitted > 0

    @property
    def stopping(self) -> bool:
        """Whether no more answers are taken."""
        return self._stopping

    @property
    def session_figures(self) -> dict[str, object]:
        """Figures of the warm prefixes, in memory and on disk; read without waiting for the engine."""
        memory = self._llm.sessions if self._llm else None
        on_disk = self.disk.figures if self.disk else None
        caches = {"session_cache": memory.figures if memory else None, "session_disk": on_disk}
        return {name: figures for name, figures in caches.items() if figures is not None}

    @property
    def memory_figures(self) -> dict[str, int]:
        """Bytes that the model may use, that its weights take, and that the answers which run may come to hold."""
        promised = together(ticket.need for ticket in list(self._running))
        if self._llm is None:
            return {"promised_to_rows": promised}
        granted = self._llm.budget.granted
        return {"budget": granted.total, "weights": granted.weights, "promised_to_rows": promised}

    @property
    def figures(self) -> dict[str, int]:
        """How many answers run and wait; read without waiting for the engine."""
        return {"running": len(self._running), "waiting": max(self._admitted - len(self._running), 0)}

    def _retry_after(self) -> int:
        """Seconds until a place may be free: a guess from the mean time of an answer."""
        return max(1, min(60, round(self.metrics.mean_seconds() * self._most_waiting / max(self._most_rows, 1))))

    # What follows runs on the engine's thread.

    def _main(self) -> None:
        leave_tidily()
        try:
            llm = self._load()
            reply = llm.budget.reply_tokens()
            llm.defaults["max_tokens"] = min(llm.defaults.get("max_tokens", reply), reply)
            self.disk = DiskSessions(llm, busy=lambda: self.busy, owners=self._owners)
            self.disk.ready(_DISK_SECONDS)
            self._llm = llm  # from here on requests come in
            while self._turn(llm):
                pass
        except BaseException as error:
            self.failure = error
            log.error("the engine's thread ended: %s", error, exc_info=not isinstance(error, SelfdraftError))
            self._fail_all(error)

    def _turn(self, llm: LLM) -> bool:
        """Obey the mailbox, admit, step, hand out. False when there is nothing more to do."""
        self._obey(wait=not llm.engine.rows and not self._waiting)
        self._admit()
        if llm.engine.rows:
            try:
                llm.engine.step()
            except Exception:  # its rows carry the error to their readers
                log.exception("a step of the engine was broken off")
                self._end_if_beyond_repair()
        self._hand_out()
        return not self._stopping or bool(self._running or self._waiting or not self._mailbox.empty())

    def _obey(self, *, wait: bool) -> None:
        if wait and not self._stopping:
            self._await_command()()
        while True:
            try:
                command = self._mailbox.get_nowait()
            except queue.Empty:
                return
            command()

    def _await_command(self) -> Callable[[], object]:
        """Sleep until there is something to do; after a while give spare buffers back, and now and then let go what
        nobody used for long."""
        assert self._llm is not None
        released = False
        while True:
            try:
                return self._mailbox.get(timeout=_TIDY_SECONDS if released else _IDLE_SECONDS)
            except queue.Empty:
                if not released:
                    self.metrics.observe_release(self._llm.release())
                    released = True
                self._make_room()

    def _admit(self) -> None:
        assert self._llm is not None
        while self._waiting and len(self._running) < self._most_rows:
            needs = [ticket.need for ticket in (*self._running, self._waiting[0])]
            if self._running and not self._llm.budget.fits(together(needs)):
                return  # it fits alone, as `submit` checked; wait for others to end
            ticket = self._waiting.popleft()
            self._running.append(ticket)
            self.metrics.queue_seconds.observe(time.perf_counter() - ticket.submitted)
            self._make_room(ticket.need.bytes)
            try:
                ticket.answer.begin()
            except Exception as error:
                self._deliver([(ticket, self._failed(ticket, error))])

    def _hand_out(self) -> None:
        ready: list[tuple[Ticket, Received]] = []
        ended: list[Ticket] = []
        for ticket in list(self._running):
            if (row := ticket.answer.row) is not None:
                self.metrics.observe_drafts(ticket, row.statistics)
            try:
                while (piece := ticket.answer.take()) is not None:
                    ready.append((ticket, piece))
                    self.metrics.observe_piece(ticket, piece)
            except Exception as error:
                ready.append((ticket, self._failed(ticket, error)))
            else:
                if ticket.answer.over:
                    self._leave(ticket)
                    ended.append(ticket)
        self._deliver(ready)
        if ended:
            self._make_room()
            self._settle(ended)

    def _settle(self, ended: Sequence[Ticket]) -> None:
        """Keep what ended answers leave for the next turn, once their readers have them."""
        for ticket in ended:
            try:
                ticket.answer.settle()
            except Exception:
                log.exception("the state behind an answer could not be kept; the next turn forwards its prompt again")
                self._end_if_beyond_repair()

    def _end_if_beyond_repair(self) -> None:
        if (why := self.beyond_repair()) is not None:
            raise why

    def _make_room(self, newcomer: int = 0) -> None:
        """Have warm prefixes give way to rows, and to the bytes of one that joins."""
        assert self._llm is not None
        try:
            needs = [ticket.need for ticket in self._running]
            self._llm.make_room(needs, lacking=self._llm.budget.lacking(newcomer))
        except Exception:
            log.exception("warm prefixes could not be let go")

    def _failed(self, ticket: Ticket, error: Exception) -> Exception:
        """Take out an answer that failed, for whatever reason: the others go on."""
        if not isinstance(error, SelfdraftError):
            log.error("an answer failed", exc_info=error)
        self.metrics.observe_piece(ticket, error)
        ticket.answer.cancel()
        self._leave(ticket)
        return error

    def _deliver(self, ready: list[tuple[Ticket, Received]]) -> None:
        """Hand pieces to their event loops, one wake-up a loop."""
        for loop in {ticket.loop for ticket, _ in ready}:
            mine = [(ticket, received) for ticket, received in ready if ticket.loop is loop]
            try:
                loop.call_soon_threadsafe(_put, mine)
            except RuntimeError:  # the loop was closed: nobody reads any more
                log.debug("pieces of %d answers had no reader", len(mine))

    def _drop(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                self._free()
            elif ticket in self._running:
                ticket.answer.cancel()

    def _leave(self, ticket: Ticket) -> None:
        self._running.remove(ticket)
        self._free()

    def _free(self) -> None:
        with self._lock:
            self._admitted -= 1

    def _give_fans_back(self) -> None:
        if self._llm is not None and self._llm.max_mode is not None:
            self._llm.max_mode.close()

    def _fail_all(self, error: BaseException) -> None:
        failed = SelfdraftError(f"the engine broke down ({type(error).__name__}: {error}); restart the server")
        failed = error if error is self.failure and isinstance(error, SelfdraftError) else failed
        with self._lock:
            self._stopping = True
        self._running, running = [], self._running  # what is in the mail is not for rows of an engine that is no more
        self._obey(wait=False)
        self._deliver([(ticket, failed) for ticket in (*running, *self._waiting)])
        self._waiting = deque()
        with self._lock:
            self._admitted = 0
        self._give_fans_back()


def _put(ready: list[tuple[Ticket, Received]]) -> None:
    for ticket, received in ready:
        ticket.received.put_nowait((ticket.index, received))
