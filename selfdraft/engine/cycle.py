"""One cycle over a batch of rows: draft, verify, accept, commit.

The first three stages only build a graph; `read` evaluates it, which is the one time a cycle waits for the device. Rows
with a constraint are the exception: `accept` waits for their drafts, and asks what is allowed behind them while the
device verifies. The trunk runs once, in `verify`; nothing here can run it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..errors import NonFiniteLogits
from ..kernels import acceptance, report
from ..kernels.portable import backend
from ..kernels.report import Report
from ..kernels.small_arrays import numbers
from ..models.base import Model, runs_ahead
from ..params import SamplingParams
from ..state import Captured
from .accept import BLOCK, RejectionRule, at, coupled, rejection
from .ahead import Place, Unread, may_draft_ahead
from .batch import Batch
from .constraint import Allowed, dead_end
from .row import Pending, Row, TokenScores
from .sampling import Chain
from .scores import raw_scores, read_scores

__all__ = ["Choose", "Cycle", "Decision", "Drafts", "Flight", "Outcome", "Verified", "emit"]

Choose = Callable[[], list[int]]

# A row that decodes at depth 0 for now lets the pairs its head has not seen pile up to this many.
HISTORY_BACKLOG = 64


@dataclass(frozen=True)
class Drafts:
    """What the head proposed. tokens [B, K]; z the filtered logits [B, K, V] they were drawn from; flaws of these."""

    tokens: mx.array
    z: mx.array | None
    flaws: mx.array


@dataclass(frozen=True)
class Verified:
    """The trunk's pass over [last, d_1..d_K]: hidden [B, K+1, H], raw logits [B, K+1, V], what it captured."""

    hidden: mx.array
    logits: mx.array
    captured: Captured


@dataclass(frozen=True)
class Decision:
    """What acceptance decides, before the host reads it.

    Attributes:
        accepted: drafts that stay, [B].
        following: the token after these, [B].
        report: both as the host reads them, and whether the logits that they hang on are finite.
        scores: see `raw_scores`.
        allowed: what constraints allow; None when no row has one.
    """

    accepted: mx.array
    following: mx.array
    report: Report
    scores: tuple[mx.array, ...]
    allowed: Allowed | None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All that the host reads."""
        return (*self.report.parts, *self.scores)


@dataclass
class Flight:
    """A cycle on its way: built, not yet read."""

    batch: Batch
    verified: Verified
    decision: Decision


@dataclass(frozen=True)
class Outcome:
    """Read by the host, per row. accepted: drafts that stay; sound: whether the logits that this hangs on are finite;
    tokens: these drafts and the one after, then anything."""

    accepted: list[int]
    sound: list[bool]
    tokens: list[list[int]]
    scores: list[list[TokenScores]] | None


class Cycle:
    """The stages of a cycle for one model.

    Attributes:
        synchronisations: how often the host waited for the device.
    """

    def __init__(self, model: Model, rule: RejectionRule) -> None:
        self._model = model
        self._rule = rule
        self._chain_key: list[tuple[SamplingParams, frozenset[int]]] = []
        self._chain: Chain | None = None
        self._ahead: Flight | None = None
        self._asked: tuple[list[Row], list[int]] | None = None
        # Where kernels are compiled for each width, the head's pairs are always as many as a row could have accepted.
        self._wide = backend() is not None
        self.synchronisations = 0

    def run(self, rows: Sequence[Row], choose: Choose, *, look_ahead: bool = False) -> list[int]:
        """Advance rows by one cycle.

        Args:
            choose: gives the depth of each row for the next cycle that is started.
            look_ahead: whether the same rows are to be advanced again after this, as far as is known.

        Returns:
            The depths of the cycle.
        """
        flight = self._take_ahead(rows) or self.launch(rows, self._take_depths(rows, choose))
        for row in rows:
            row.statistics.trunk_forwards += 1
        if look_ahead:
            self._ahead = self._launch_ahead(flight, choose)
        self.commit(flight, self.read(flight))
        return flight.batch.depths

    @property
    def rows_ahead(self) -> list[Row]:
        """Rows whose next cycle is on its way already; these must be run next."""
        return self._ahead.batch.rows if self._ahead else []

    def drop_ahead(self, row: Row) -> None:
        """Forget the cycle that was started early if this row, which ended, is one of it."""
        if row in self.rows_ahead:
            self._ahead = None

    def launch(self, rows: Sequence[Row], depths: Sequence[int], unread: Unread | None = None) -> Flight:
        """Build a cycle: everything up to what the host has to know."""
        batch = self.batch(rows, depths, unread)
        drafts = self.draft(batch)
        verified = self.verify(batch, drafts)
        return Flight(batch, verified, self.accept(batch, drafts, verified))

    def batch(self, rows: Sequence[Row], depths: Sequence[int], unread: Unread | None = None) -> Batch:
        """Put rows together; the chain is built again only when what it is made of changed."""
        key = [(row.params, row.stop_ids) for row in rows]
        if self._chain is None or key != self._chain_key:
            self._chain = Chain([row.params for row in rows], [row.stop_ids for row in rows], self._model.vocab_size)
            self._chain_key = key
        return Batch(rows, depths, self._chain, self._model.vocab_size, unread)

    def draft(self, batch: Batch) -> Drafts:
        """K drafts a row, each seeing the one before it; rows of depth 0 are left out."""
        drafting = [index for index, depth in enumerate(batch.depths) if depth > 0]
        if batch.unread is None:
            self._catch_up(batch)
        if not drafting:
            none = (len(batch.rows), 0)
            return Drafts(mx.zeros(none, mx.uint32), None, mx.zeros(none, mx.int32))
        rows = [batch.rows[index] for index in drafting]
        states = [row.state for row in rows]
        hidden = self.commit_history(rows, batch.unread)
        _begin(batch, hidden)  # the head runs while the host builds on, and asks what may come first
        first = batch.allowed()

        tokens: list[mx.array] = []
        filtered, flaws = [], []
        for step in range(batch.depth):
            # What may be drafted and what is allowed could have nothing in common.
            logits = self._model.draft_logits(hidden, step, whole=step == 0 and first is not None)
            logits = _spread(logits, drafting, len(batch.rows))
            before = mx.concatenate(tokens, axis=1) if tokens else None
            z, flaw = batch.chain(logits, batch.emitted, batch.histories, before, None if step else first)
            drafted = batch.choose(z, step)
            tokens.append(drafted)
            filtered.append(z)
            flaws.append(flaw)
            if step + 1 < batch.depth:
                # Drafted entries go behind the committed ones; the next commit_history overwrites them.
                offsets = [state.head_length + step for state in states]
                own = drafted if len(drafting) == len(batch.rows) else drafted[numbers(tuple(drafting))]
                hidden = self._model.draft(own, hidden, states, offsets, step + 1, **batch.unread_lengths)
            _begin(batch, drafted)  # the device drafts while the host builds what comes behind
        return Drafts(*(mx.concatenate(parts, axis=1) for parts in (tokens, filtered, flaws)))

    def commit_history(self, rows: Sequence[Row], unread: Unread | None = None) -> mx.array:
        """Give the head the true pairs of what was emitted since it last ran, in one wide pass.

        Args:
            unread: of the cycle that emitted it, if the host has not read that; its pairs are counted once it has.

        Returns:
            The head's output at each row's newest pair, [B, 1, H]: the first draft comes from it.
        """
        states = [row.state for row in rows]
        if unread is not None:
            assert unread.hidden is not None
            assert unread.tokens is not None
            assert unread.accepted is not None
            out = self._model.draft(unread.tokens, unread.hidden, states, [state.head_length for state in states])
            return at(out, unread.accepted)[:, None]
        pending = [row.pending for row in rows if row.pending]
        assert len(pending) == len(rows)
        counts = [len(pairs.tokens) for pairs in pending]
        width = max(pairs.hidden.shape[0] for pairs in pending) if self._wide else max(counts)
        padded = [pairs.padded(width) for pairs in pending]
        hidden, tokens = (mx.stack(list(arrays)) for arrays in zip(*padded, strict=True))
        out = self._model.draft(tokens, hidden, states, [state.head_length for state in states])
        for row, count in zip(rows, counts, strict=True):
            row.state.head_length += count
            row.pending = None
        return at(out, numbers(tuple(count - 1 for count in counts)))[:, None]

    def verify(self, batch: Batch, drafts: Drafts) -> Verified:
        """One trunk forward on the last token and the drafts."""
        tokens = mx.concatenate([batch.last, drafts.tokens], axis=1)
        hidden, captured = self._model.forward(tokens, batch.states, keep_steps=True, **batch.unread_lengths)
        logits = self._model.logits(hidden)
        _begin(batch, logits)  # and verifies while acceptance is built
        return Verified(hidden, logits, captured)

    def accept(self, batch: Batch, drafts: Drafts, verified: Verified) -> Decision:
        """Decide what stays of the drafts, and the token after."""
        before = drafts.tokens if batch.unread is None or batch.depth else batch.unread.last
        allowed = self._allowed(batch, drafts)
        z, flaws = batch.chain(verified.logits, batch.emitted, batch.histories, before, allowed)
        accepted, following = self._decide(batch, drafts, z)
        given = accepted, following, drafts.tokens, numbers(tuple(batch.depths)), batch.coupled, flaws, drafts.flaws
        told = report.report(*given) if report.CHECK.passed else report.report_reference(*given)
        scores = raw_scores(verified.logits, told.tokens, batch.rows)
        return Decision(accepted, following, told, scores, allowed)

    def read(self, flight: Flight) -> Outcome:
        """Wait for a cycle: its one synchronisation."""
        self.synchronisations += 1
        decision = flight.decision
        mx.eval(*decision.arrays)
        return Outcome(*decision.report.read(), read_scores(decision.report.tokens, decision.scores))

    def commit(self, flight: Flight, outcome: Outcome) -> None:
        """Move lengths and states to what was emitted, and end the rows that are through."""
        batch, verified, kept_counts = flight.batch, flight.verified, []
        for index, row in enumerate(batch.rows):
            accepted, depth = outcome.accepted[index], batch.depths[index]
            row.draws += batch.depth + 1
            row.statistics.cycles += 1
            if not outcome.sound[index]:
                row.error = NonFiniteLogits(
                    f"the model produced NaN or infinite logits after {len(row.emitted)} tokens; "
                    "try another dtype (SELFDRAFT_DTYPE=float32) or fetch the checkpoint again"
                )
                kept_counts.append(0)
                continue
            tokens, allowed = outcome.tokens[index][: accepted + 1], flight.decision.allowed
            kept = emit(row, allowed.before_dead_end(index, tokens) if allowed else tokens)
            if not row.done and len(kept) <= accepted:
                row.error = dead_end(len(row.emitted))
            self._count(row, depth, accepted, len(kept))
            kept_counts.append(len(kept))
            if row.drafts and kept:
                self._remember(row, Pending(verified.hidden[index], kept, flight.decision.report.tokens[index]))
            if outcome.scores and row.params.logprobs is not None:
                row.scores += [score.best(row.params.logprobs) for score in outcome.scores[index][: len(kept)]]
        verified.captured.commit(batch.states, kept_counts)

    def _launch_ahead(self, flight: Flight, choose: Choose) -> Flight | None:
        """Start the next cycle before this one is read, so that the device does not idle.

        Rows that never draft emit one token, whatever it is. Where some draft, what they emit stays on the device, if
        the model takes it from there. When a row ends, the cycle started here is dropped: a forward wasted, never one
        repeated. A constraint must see the tokens first: its row waits.
        """
        batch = flight.batch
        if batch.constrained:
            return None
        if any(row.drafts for row in batch.rows):
            if not runs_ahead(self._model, batch.states, batch.depth + 1):
                return None
            self._asked = batch.rows, choose()
            if not may_draft_ahead(batch.rows, batch.depths, self._asked[1]):
                return None
            depths = self._take_depths(batch.rows, choose)
        elif any(row.remaining < 2 for row in batch.rows):
            return None
        else:
            depths = batch.depths
        mx.async_eval(*flight.decision.arrays)
        places = [Place.of(state) for state in batch.states]
        ahead = self.launch(batch.rows, depths, self._leave_unread(flight))
        mx.async_eval(*ahead.decision.arrays)
        for place in places:
            place.put_back()
        return ahead

    def _take_depths(self, rows: Sequence[Row], choose: Choose) -> list[int]:
        """Those that were asked for a cycle that could not be started early, or new ones."""
        asked, self._asked = self._asked, None
        if asked is None or asked[0] != list(rows):
            return choose()
        return [max(min(depth, row.remaining - 1), 0) for row, depth in zip(rows, asked[1], strict=True)]

    def _leave_unread(self, flight: Flight) -> Unread:
        """Move the states behind a cycle that is not read, and say what it leaves."""
        batch, decision, captured = flight.batch, flight.decision, flight.verified.captured
        last, told = decision.following[:, None], decision.report
        if batch.depth == 0:
            captured.commit(batch.states, [1] * len(batch.rows))
            return Unread(last)
        captured.commit_on_device(batch.states, told.counts)
        return Unread(last, decision.accepted, told.counts, batch.depth + 1, flight.verified.hidden, told.tokens)

    def _take_ahead(self, rows: Sequence[Row]) -> Flight | None:
        """The cycle that was started early, if there is one."""
        ahead, self._ahead = self._ahead, None
        assert ahead is None or ahead.batch.rows == list(rows), "a cycle that was started early is run next or dropped"
        if ahead and ahead.batch.shift is not None:  # the head saw the pairs that the host knows of only now
            for row in rows:
                assert row.pending is not None
                row.state.head_length += len(row.pending.tokens)
                row.pending = None
        return ahead

    def _catch_up(self, batch: Batch) -> None:
        """Commit the history of rows that decode at depth 0 and have a long backlog."""
        resting = [
            row
            for row, depth in zip(batch.rows, batch.depths, strict=True)
            if depth == 0 and row.pending and len(row.pending.tokens) >= HISTORY_BACKLOG
        ]
        if resting:
            self.commit_history(resting)

    def _allowed(self, batch: Batch, drafts: Drafts) -> Allowed | None:
        """What rows may emit along their drafts; waits for these when a row with a constraint drafted.

        When none did, position 0 is all that such rows have, and its mask may stand for all positions.
        """
        waits = any(c is not None and depth > 0 for c, depth in zip(batch.constraints, batch.depths, strict=True))
        self.synchronisations += int(waits)
        return batch.allowed(drafts.tokens if waits else None)

    def _decide(self, batch: Batch, drafts: Drafts, z: mx.array) -> tuple[mx.array, mx.array]:
        """Accepted counts [B] and following tokens [B], each row by its rule."""
        depths = numbers(tuple(batch.depths))
        is_coupled = [row.coupled for row in batch.rows]
        if batch.depth == 0 or all(is_coupled):
            return coupled(batch.choose(z), drafts.tokens, depths)
        by_ratio = self._reject(batch, drafts, z, depths)
        if not any(is_coupled):
            return by_ratio
        by_choice = coupled(batch.choose(z), drafts.tokens, depths)
        chosen = numbers(tuple(int(each) for each in is_coupled)) > 0
        return mx.where(chosen, by_choice[0], by_ratio[0]), mx.where(chosen, by_choice[1], by_ratio[1])

    def _reject(self, batch: Batch, drafts: Drafts, z: mx.array, depths: mx.array) -> tuple[mx.array, mx.array]:
        """Rejection sampling of all rows. The noise of position K is for what follows: no draft was drawn with it."""
        assert drafts.z is not None
        if acceptance.CHECK.passed and acceptance.fits(batch.depth, z.shape[-1]):
            given = z, drafts.z, drafts.tokens, depths, batch.uniforms, batch.keys[:, -1]
            return acceptance.accept_rejection(*given, block=self._rule is BLOCK)
        assert batch.noise is not None
        p, q = mx.softmax(z, axis=-1), mx.softmax(drafts.z, axis=-1)
        return rejection(self._rule, p, q, drafts.tokens, depths, batch.uniforms, batch.noise[:, -1])

    def _count(self, row: Row, depth: int, accepted: int, kept: int) -> None:
        """Statistics of a cycle of which `kept` tokens were emitted."""
        # Drafts behind an accepted stop were never up for a decision.
        tried, stayed = (kept, kept) if kept <= accepted else (min(accepted + 1, depth), accepted)
        row.statistics.count_drafts(tried, stayed)
        row.policy.observe(tried, stayed)
        row.statistics.emitted["draft"] += stayed
        if kept > accepted:
            kind = "plain" if depth == 0 else "bonus" if accepted == depth else "correction"
            row.statistics.emitted[kind] += 1

    def _remember(self, row: Row, pairs: Pending) -> None:
        """Keep true pairs for the head's next wide pass."""
        if row.pending is None:
            row.pending = pairs
        else:
            row.pending.extend(pairs.hidden[: len(pairs.tokens)], pairs.tokens)


def _begin(batch: Batch, array: mx.array) -> None:
    """Have the device begin with what is built; not if it still has the cycle before, for each time costs the host."""
    if batch.unread is None:
        mx.async_eval(array)


def emit(row: Row, tokens: list[int]) -> list[int]:
    """Add tokens to a row up to its stop or its limit, and end it there.

    Returns:
        The tokens that were emitted: a stop wins over whatever was accepted behind it.
    """
    kept = tokens
    for index, token in enumerate(tokens):
        if token in row.stop_ids:
            kept = tokens[: index + 1]
            row.finish_reason = "stop"
            break
    if kept and row.request.text_stop and (count := row.request.text_stop(kept)) is not None:
        kept = kept[:count]
        row.finish_reason = "stop"
    row.emitted += kept
    if row.history is not None:
        row.history.emit(kept)
    if row.request.constraint is not None:
        row.request.constraint.emit(kept)
    if row.finish_reason is None and row.remaining <= 0:
        row.finish_reason = "length"
    return kept


def _spread(x: mx.array, drafting: list[int], rows: int) -> mx.array:
    """What the drafting rows have, laid out over the whole batch; others repeat a row and are ignored."""
    if len(drafting) == rows:
        return x
    place = {row: position for position, row in enumerate(drafting)}
    return x[numbers(tuple(place.get(row, 0) for row in range(rows)))]
