"""The engine on a thread of its own: answers go in, pieces come out. Knows nothing of HTTP or of chats.

Everything that touches the model happens on that thread; the rest of the server talks to it through a mailbox. Rows run
side by side up to a limit, further answers wait in a bounded queue, and none is admitted whose memory is not there.
"""

from __future__ import annotations

import asyncio
import gc
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
from ..memory import Holdings, release_buffers
from ..results import Piece
from ..sessions.bank import BankFigures
from ..sessions.disk.shared import Shared
from ..sessions.disk.store import DiskFigures
from ..stream import Answer
from .errors import Loading, QueueFull
from .metrics import ModelMetrics
from .turns import Turns

__all__ = ["EngineService", "Ticket"]

log = logging.getLogger(__name__)

Received = Piece | Exception

_DISK_SECONDS = 3.0  # that the first request may wait for what is on disk; weights never seen before take longer
_DISK_CLOSE_SECONDS = 10.0  # that what is on its way to the disk may take at the end
_IDLE_SECONDS = 10.0  # without a row, after which MLX's spare buffers are given back
_TIDY_SECONDS = 60.0  # between looks at what an idle server could let go
_BESIDE_SECONDS = 0.02  # between looks at whether rows of another model have left an answer its memory

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
        turns: shared with the engines of other models on the device.
        shared: the session cache on disk, likewise.
        busy: whether any of them has answers that run or wait; by default whether this one has.

    Attributes:
        disk: warm prefixes on disk; None as long as there is no model.
        beyond_repair: asked when the engine broke off: why nothing can be decoded any more, if that is so.
        on_admitted: called on the engine's thread when an answer takes memory of what all models share.
    """

    def __init__(
        self,
        load: Callable[[], LLM],
        *,
        rows: int,
        waiting: int,
        metrics: ModelMetrics,
        owners: int = 1,
        turns: Turns | None = None,
        shared: Shared | None = None,
        busy: Callable[[], bool] | None = None,
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
        self._turns = turns or Turns()
        self._shared = shared
        self._any_busy = busy or (lambda: self.busy)
        self._decided = threading.Event()  # whether there is a model
        self.disk: DiskSessions | None = None
        self.beyond_repair: Callable[[], SelfdraftError | None] = lambda: None
        self.on_admitted: Callable[[], object] = lambda: None
        self.metrics = metrics
        self.failure: BaseException | None = None

    def open(self) -> EngineService:
        """Load the model, and wait until it is there.

        Raises:
            Exception: why it cannot be loaded.
        """
        self._thread.start()
        self._decided.wait()
        if self.failure is not None:
            raise self.failure
        return self

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

    def stop(self, *, save_prefixes: float = 0) -> None:
        """Cancel what runs and waits, end the thread, and give the model's memory back.

        Args:
            save_prefixes: seconds that warm prefixes may take to get to the disk, if they were not to go there yet; 0
                leaves them, for whoever waits for the program to end.
        """
        self.drain()
        self._mailbox.put(lambda: self._drop([*self._waiting, *self._running]))
        # A model that is still being loaded is not waited for any longer, and a thread that hangs not at all.
        self._thread.join(10 if self.failure is None else 1)
        self._give_fans_back()
        if self.disk is not None:
            if save_prefixes:
                self.disk.save(save_prefixes)
            self.disk.close(save_prefixes or _DISK_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._llm = self.disk = None
            gc.collect()  # a model's parts know each other
            release_buffers()

    def make_room(self) -> None:
        """Have warm prefixes give way to what other models hold by now, soon."""
        self._mailbox.put(self._make_room)

    def fail(self, error: SelfdraftError) -> None:
        """End everything with an error, from another thread: the engine's waits for what never comes."""
        self.failure = error
        self._decided.set()  # who waits for the model waits for nothing
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
    def session_figures(self) -> BankFigures | None:
        """Figures of the warm prefixes in memory; read without waiting for the engine."""
        return self._llm.sessions.figures if self._llm and self._llm.sessions else None

    @property
    def disk_figures(self) -> DiskFigures | None:
        """Of those on disk."""
        return self.disk.figures if self.disk else None

    @property
    def holdings(self) -> Holdings:
        """Bytes of the weights, of the rows as long as they may become, and of the warm prefixes in memory."""
        rows = together(ticket.need for ticket in list(self._running))
        llm = self._llm
        if llm is None:
            return Holdings(rows=rows)
        return Holdings(llm.budget.granted.weights, rows, llm.session_bytes)

    @property
    def budget(self) -> int:
        """Bytes that it may use together with other models; 0 before it is there."""
        return self._llm.budget.granted.total if self._llm else 0

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
            self.disk = DiskSessions(llm, busy=self._any_busy, owners=self._owners, shared=self._shared)
            self.disk.ready(_DISK_SECONDS)
            self._llm = llm  # from here on requests come in
            self._decided.set()
            while self._turn(llm):
                pass
        except BaseException as error:
            self.failure = error
            log.error("the engine's thread ended: %s", error, exc_info=not isinstance(error, SelfdraftError))
            self._fail_all(error)
        finally:
            self._decided.set()

    def _turn(self, llm: LLM) -> bool:
        """Obey the mailbox, admit, step, hand out. False when there is nothing more to do."""
        self._obey(wait=not llm.engine.rows)
        self._admit()
        if llm.engine.rows:
            try:
                with self._turns:
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
        if self._waiting:  # for rows of another model to end
            try:
                return self._mailbox.get(timeout=_BESIDE_SECONDS)
            except queue.Empty:
                return lambda: None
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
            if not self._llm.budget.fits_now(together(needs)):
                return  # it fits alone, as `submit` checked; wait for others to end
            ticket = self._waiting.popleft()
            self._running.append(ticket)
            self.metrics.queue_seconds.observe(time.perf_counter() - ticket.submitted)
            self._make_room(ticket.need.bytes)
            self.on_admitted()
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
                with self._turns:
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
