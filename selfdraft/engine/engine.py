"""The engine loop: rows join, advance together, and leave at cycle boundaries."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator

from ..errors import SelfdraftError
from ..models.base import Model, looks_ahead
from ..params import SamplingParams
from . import noise
from .accept import BLOCK, RejectionRule
from .cycle import HISTORY_BACKLOG, Cycle
from .depth import AdaptiveDepth, CostModel, DepthPolicy, DepthStart, FixedDepth
from .modes import EngineMode, Plan, plan
from .prefill import Prefill
from .row import Request, Row, validate
from .sampling import History
from .threads import leave_tidily

__all__ = ["Engine"]

log = logging.getLogger(__name__)


class Engine:
    """Decodes any number of rows with one model. Not thread-safe: one thread calls it.

    Args:
        model: trunk and head.
        rule: rejection rule for rows that are neither greedy nor seeded.
        prefill_chunk: prompt tokens of one forward.
        mode: how large buffers of keys and values are made; see `modes.plan`.
        cycle: the stages to use; a `ProfiledCycle` times them.
        start: what `depth=auto` begins with.

    Attributes:
        on_rows: told True when a row joins, and False when there is none any more.
    """

    def __init__(
        self,
        model: Model,
        *,
        rule: RejectionRule = BLOCK,
        prefill_chunk: int = 4096,
        mode: EngineMode = "auto",
        cycle: Cycle | None = None,
        start: DepthStart | None = None,
    ) -> None:
        self.model = model
        self.cycle = cycle or Cycle(model, rule)
        self.costs = CostModel()
        self.start_from(start)
        self.prefill_chunk = prefill_chunk
        self.mode = mode
        self.on_rows: Callable[[bool], object] = lambda there_are: None
        self._prefill = Prefill(model, self.cycle, prefill_chunk)
        self._joining: deque[Row] = deque()
        self._running: list[Row] = []
        self._prefill_is_next = True
        self._last_read = 0.0  # clock time at the end of the last cycle

    def start_from(self, start: DepthStart | None) -> None:
        """Let rows with `depth=auto` that are added from now on begin with what was measured before."""
        self._start = start
        if start:
            self.costs.start(start.seconds)

    @property
    def rows(self) -> list[Row]:
        """Rows that are not done, in order of arrival."""
        return [*self._running, *self._joining]

    def check(self, request: Request) -> SamplingParams:
        """The parameters a request would run with.

        Raises:
            InvalidRequest: it does not fit the model (see `row.validate`).
        """
        model = self.model
        return validate(
            request, vocab_size=model.vocab_size, context_length=model.context_length, max_depth=model.max_depth
        )

    def plan(self, request: Request) -> Plan:
        """The mode that a request would run in; its parameters are resolved."""
        model, prompt = self.model, len(request.prompt)
        assert request.params.max_tokens is not None
        tokens = prompt if request.only_prompt else prompt + request.params.max_tokens
        return plan(
            request.mode or self.mode,
            prompt,
            min(tokens, model.context_length),
            # Of each row as many tokens are forwarded as of the deepest, twice where a cycle is started early; and as
            # many pairs as wait for the head of any.
            beside=2 * (model.max_depth + 1) + HISTORY_BACKLOG,
            context=model.context_length,
        )

    def add(self, request: Request) -> Row:
        """Accept a request; its prompt is forwarded by the next calls of `step`. Raises what `check` raises."""
        model = self.model
        params = self.check(request)
        assert params.max_tokens is not None
        penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        policy: DepthPolicy
        if params.depth == "auto" and model.max_depth:
            policy = AdaptiveDepth(model.max_depth, self.costs, self._start)
        else:
            policy = FixedDepth(0 if params.depth == "auto" else params.depth)
        speaks = not request.only_prompt and (params.max_tokens > 1 or request.session is not None)
        planned = self.plan(request)
        row = Row(
            request=request,
            params=params,
            state=model.new_state(),
            policy=policy,
            stream=noise.stream(params.seed, request.choice),
            history=History(request.prompt, model.vocab_size) if penalised else None,
            mode=planned.mode,
            room=planned.room,
            drafts=model.max_depth > 0 and params.depth != 0 and speaks,
        )
        self._joining.append(row)
        self.on_rows(True)
        return row

    def cancel(self, row: Row) -> None:
        """End a row now. What it emitted stays; the other rows go on."""
        if not row.done:
            row.finish_reason = "cancelled"
        self._sweep()

    def settle(self, row: Row) -> None:
        """Let the session of a row that is done have what it leaves: a boundary behind its newest token.

        Costs a forward of one token, so whoever steps the engine calls it once the answer is delivered.
        """
        assert row.done
        with self._failing([row]):
            self._prefill.settle(row)
        if row.request.session is not None:
            row.request.session.release()

    def step(self) -> list[Row]:
        """One prefill chunk of a row that is joining, or one cycle of all that run; in turn if there are both.

        Rows that join take turns as well: a short prompt does not wait for all of a long one.

        Returns:
            The rows that emitted or ended. A row with `error` set broke down.
        """
        leave_tidily()
        advanced: list[Row] = []
        if self._joining and (self._prefill_is_next or not self._running):
            self._prefill_is_next = False
            row = self._joining[0]
            with self._failing([row]):
                through = self._prefill.advance(row)
            if through:
                advanced = [row]
                if not row.done:
                    self._running.append(self._joining.popleft())
            else:
                self._joining.rotate(-1)
        elif self._running:
            self._prefill_is_next = True
            # Rows that joined since a cycle was started early wait for it.
            advanced = list(self.cycle.rows_ahead or self._running)
            with self._failing(advanced):
                self._cycle(advanced)
        self._sweep()
        return advanced

    def run(self, row: Row) -> Iterator[list[int]]:
        """Step until `row` is done, yielding what it emitted since the last yield; nothing after a prefill chunk.

        Several rows may be run side by side: whoever steps advances them all.

        Raises:
            NonFiniteLogits: the model broke down on this row.
        """
        seen = 0
        while seen < len(row.emitted) or not row.done:
            if seen == len(row.emitted):
                self.step()
            tokens = row.emitted[seen:]
            seen += len(tokens)  # before the yield: others may step while this reader waits
            yield tokens
        if row.error is not None:
            raise row.error

    def _cycle(self, rows: list[Row]) -> None:
        def choose() -> list[int]:
            return [max(min(row.policy.choose(len(rows)), row.remaining - 1), 0) for row in rows]

        # A cycle that was started early is timed from the end of the one before: what the caller did meanwhile counts.
        begin = self._last_read if self.cycle.rows_ahead else time.perf_counter()
        look_ahead = looks_ahead(self.model) and len(rows) == len(self._running)
        depths = self.cycle.run(rows, choose, look_ahead=look_ahead)
        self._last_read = time.perf_counter()
        seconds = self._last_read - begin
        if any(row.drafts for row in rows):  # rows that never draft run ahead: no measure for one that does
            self.costs.observe(len(rows), max(depths), seconds)
        for row in rows:
            row.statistics.decode_seconds += seconds

    @contextlib.contextmanager
    def _failing(self, rows: list[Row]) -> Iterator[None]:
        """A step that breaks off (out of memory, Ctrl-C) leaves its rows half moved: they end, others go on."""
        try:
            yield
        except BaseException as error:
            for row in rows:
                row.error = SelfdraftError(f"decoding was broken off by {type(error).__name__}: {error}")
            self._sweep()
            raise

    def _sweep(self) -> None:
        """Let rows that are done leave, each with a line in the log."""
        for row in self.rows:
            if row.done:
                log.info("row done: %s", row.describe())
                self.cycle.drop_ahead(row)
                if row.request.session is not None:
                    row.request.session.release()
        self._running = [row for row in self._running if not row.done]
        self._joining = deque(row for row in self._joining if not row.done)
        if not self.rows:
            self.on_rows(False)
