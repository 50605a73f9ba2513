"""Prometheus metrics of the server: raw counters, in the names vLLM made common. Knows no HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..results import Generation, Piece

if TYPE_CHECKING:
    from ..engine.statistics import RowStatistics
    from .service import Ticket

__all__ = ["Metrics"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_RATES = (1, 2, 5, 10, 20, 40, 60, 80, 100, 150, 200, 400)


# Fields of the figures of caches that may fall; the others count up.
_LEVELS = frozenset({"bytes", "entries", "records", "pending_bytes", "writing"})


class _CacheFigures(Collector):
    """Figures of caches as they are when asked."""

    def __init__(self, caches: Callable[[], Mapping[str, object]]) -> None:
        self._caches = caches

    def collect(self) -> Iterator[Metric]:
        for cache, figures in self._caches().items():
            for name, value in vars(figures).items():
                kind = GaugeMetricFamily if name in _LEVELS else CounterMetricFamily
                yield kind(
                    f"selfdraft_{cache}_{name}", f"{name.replace('_', ' ')} of warm prefixes", value=float(value)
                )


class Metrics:
    """Counters of one server, in a registry of its own: two servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "selfdraft_requests", "HTTP requests by path and status", ["path", "status"], registry=registry
        )
        self.refused = Counter("selfdraft_refused", "answers refused because the queue was full", registry=registry)
        self.answers = Counter("selfdraft_answers", "answers by how they ended", ["finish_reason"], registry=registry)
        self.prompt_tokens = Counter("selfdraft_prompt_tokens", "prompt tokens of finished answers", registry=registry)
        self.completion_tokens = Counter("selfdraft_generation_tokens", "tokens emitted", registry=registry)
        self.running = Gauge("selfdraft_num_requests_running", "answers that run", registry=registry)
        self.waiting = Gauge("selfdraft_num_requests_waiting", "answers that wait", registry=registry)
        self.memory = Gauge("selfdraft_memory_bytes", "memory by kind", ["kind"], registry=registry)
        self.releases = Counter(
            "selfdraft_memory_releases", "times that an idle server gave MLX's spare buffers back", registry=registry
        )
        self.released_bytes = Counter("selfdraft_memory_released_bytes", "bytes that this set free", registry=registry)
        self.queue_seconds = Histogram(
            "selfdraft_queue_seconds", "time an answer waited for a place", buckets=_SECONDS, registry=registry
        )
        self.first_token = Histogram(
            "selfdraft_time_to_first_token_seconds",
            "from submission to the first piece",
            buckets=_SECONDS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "selfdraft_inter_token_seconds",
            "time between tokens: those of a cycle share the time since the last one evenly",
            buckets=_STEPS,
            registry=registry,
        )
        self.rate = Histogram(
            "selfdraft_tokens_per_second", "decoding speed of finished answers", buckets=_RATES, registry=registry
        )
        self.drafts = Counter("spec_decode_num_drafts", "cycles that drafted", registry=registry)
        self.draft_tokens = Counter(
            "spec_decode_num_draft_tokens", "drafts that were up for a decision", registry=registry
        )
        self.accepted_tokens = Counter("spec_decode_num_accepted_tokens", "drafts that were kept", registry=registry)
        self.accepted_per_position = Counter(
            "spec_decode_num_accepted_tokens_per_pos", "drafts kept, by position", ["position"], registry=registry
        )
        self._seconds = 0.0
        self._finished = 0

    def watch(self, caches: Callable[[], Mapping[str, object]]) -> None:
        """Tell, at every scrape, the figures of caches: dataclasses of numbers, by the name of the cache."""
        self.registry.register(_CacheFigures(caches))

    def observe_piece(self, ticket: Ticket, received: Piece | Exception) -> None:
        """Count a piece that an answer yielded, or what ended it."""
        if isinstance(received, Exception):
            self.answers.labels("error").inc()
            return
        now = time.perf_counter()
        if received.token_ids:
            self.completion_tokens.inc(len(received.token_ids))
            if ticket.last_piece is None:
                self.first_token.observe(now - ticket.submitted)
            else:
                gap = (now - ticket.last_piece) / len(received.token_ids)
                for _ in received.token_ids:
                    self.inter_token.observe(gap)
            ticket.last_piece = now
        if received.result is not None:
            self._seconds += now - ticket.submitted
            self._finished += 1
            self._observe_result(received.result)

    def observe_drafts(self, ticket: Ticket, statistics: RowStatistics) -> None:
        """Count the drafts of an answer that were decided since the last call."""
        tried = _new(statistics.tried, ticket.drafts_tried)
        if not any(tried):
            return
        accepted = _new(statistics.accepted, ticket.drafts_accepted)
        ticket.drafts_tried, ticket.drafts_accepted = list(statistics.tried), list(statistics.accepted)
        self.drafts.inc(tried[0])
        self.draft_tokens.inc(sum(tried))
        self.accepted_tokens.inc(sum(accepted))
        for position, count in enumerate(accepted):
            if count:
                self.accepted_per_position.labels(str(position)).inc(count)

    def observe_release(self, nbytes: int) -> None:
        """Count that spare buffers were given back."""
        self.releases.inc()
        self.released_bytes.inc(nbytes)

    def mean_seconds(self) -> float:
        """Mean time an answer took; 1 before there was one."""
        return self._seconds / self._finished if self._finished else 1.0

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def _observe_result(self, result: Generation) -> None:
        timings = result.timings
        self.answers.labels(result.finish_reason).inc()
        self.prompt_tokens.inc(result.usage.prompt_tokens)
        if timings.tokens_per_second:
            self.rate.observe(timings.tokens_per_second)


def _new(counts: Sequence[int], before: Sequence[int]) -> list[int]:
    """What came to counts by position, of which there may be more than before."""
    return [now - then for now, then in zip_longest(counts, before, fillvalue=0)]
