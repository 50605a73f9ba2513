"""Prometheus metrics of the server: raw counters, in the names vLLM made common. Knows no HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..results import Generation, Piece

if TYPE_CHECKING:
    from ..engine.statistics import RowStatistics
    from .service import Ticket

__all__ = ["Figures", "Metrics", "ModelMetrics"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_RATES = (1, 2, 5, 10, 20, 40, 60, 80, 100, 150, 200, 400)


Figures = tuple[str, str, object]
"""What they are of, the name of a model ("" where they are of all), and a dataclass of numbers."""

_MODEL = "model_name"

# Fields of figures that may fall; the others count up.
_LEVELS = frozenset({"bytes", "entries", "records", "pending_bytes", "writing", "loaded"})


class _Figures(Collector):
    """Figures that others keep, as they are when asked."""

    def __init__(self, figures: Callable[[], Iterable[Figures]]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for of, model, figures in self._figures():
            for field, value in vars(figures).items():
                name, kind = f"selfdraft_{of}_{field}", GaugeMetricFamily if field in _LEVELS else CounterMetricFamily
                if name not in families:
                    meaning = f"{field.replace('_', ' ')}, of {of.replace('_', ' ')}"
                    families[name] = kind(name, meaning, labels=[_MODEL] if model else [])
                families[name].add_metric([model] if model else [], float(value))
        yield from families.values()


class Metrics:
    """Counters of one server, in a registry of its own: two servers in one process do not mix.

    Those of answers are by model; `of` has them for one.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(name, meaning, labels, registry=registry)

        def histogram(name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, meaning, [_MODEL], buckets=buckets, registry=registry)

        self.requests = counter("selfdraft_requests", "HTTP requests by path and status", "path", "status")
        self.memory = Gauge("selfdraft_memory_bytes", "memory by kind", ["kind"], registry=registry)
        self.running = Gauge("selfdraft_num_requests_running", "answers that run", [_MODEL], registry=registry)
        self.waiting = Gauge("selfdraft_num_requests_waiting", "answers that wait", [_MODEL], registry=registry)
        self.refused = counter("selfdraft_refused", "answers refused because the queue was full", _MODEL)
        self.answers = counter("selfdraft_answers", "answers by how they ended", _MODEL, "finish_reason")
        self.prompt_tokens = counter("selfdraft_prompt_tokens", "prompt tokens of finished answers", _MODEL)
        self.completion_tokens = counter("selfdraft_generation_tokens", "tokens emitted", _MODEL)
        self.releases = counter(
            "selfdraft_memory_releases", "times that an idle engine gave MLX's spare buffers back", _MODEL
        )
        self.released_bytes = counter("selfdraft_memory_released_bytes", "bytes that this set free", _MODEL)
        self.queue_seconds = histogram("selfdraft_queue_seconds", "time an answer waited for a place", _SECONDS)
        self.first_token = histogram(
            "selfdraft_time_to_first_token_seconds", "from submission to the first piece", _SECONDS
        )
        self.inter_token = histogram(
            "selfdraft_inter_token_seconds",
            "time between tokens: those of a cycle share the time since the last one evenly",
            _STEPS,
        )
        self.rate = histogram("selfdraft_tokens_per_second", "decoding speed of finished answers", _RATES)
        self.drafts = counter("spec_decode_num_drafts", "cycles that drafted", _MODEL)
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "drafts that were up for a decision", _MODEL)
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "drafts that were kept", _MODEL)
        self.accepted_per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "drafts kept, by position", _MODEL, "position"
        )
        self._models: dict[str, ModelMetrics] = {}

    def of(self, model: str) -> ModelMetrics:
        """The counters of a model; they go on when it is loaded again."""
        if model not in self._models:
            self._models[model] = ModelMetrics(self, model)
        return self._models[model]

    def watch(self, figures: Callable[[], Iterable[Figures]]) -> None:
        """Tell figures that others keep, at every scrape."""
        self.registry.register(_Figures(figures))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class ModelMetrics:
    """What is counted of one model."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.refused = metrics.refused.labels(model)
        self.queue_seconds = metrics.queue_seconds.labels(model)
        self.completion_tokens = metrics.completion_tokens.labels(model)
        self._model = model
        self._answers = metrics.answers
        self._accepted_per_position = metrics.accepted_per_position
        self._prompt_tokens = metrics.prompt_tokens.labels(model)
        self._releases = metrics.releases.labels(model)
        self._released_bytes = metrics.released_bytes.labels(model)
        self._first_token = metrics.first_token.labels(model)
        self._inter_token = metrics.inter_token.labels(model)
        self._rate = metrics.rate.labels(model)
        self._drafts = metrics.drafts.labels(model)
        self._draft_tokens = metrics.draft_tokens.labels(model)
        self._accepted_tokens = metrics.accepted_tokens.labels(model)
        self._seconds = 0.0
        self._finished = 0

    def observe_piece(self, ticket: Ticket, received: Piece | Exception) -> None:
        """Count a piece that an answer yielded, or what ended it."""
        if isinstance(received, Exception):
            self._answers.labels(self._model, "error").inc()
            return
        now = time.perf_counter()
        if received.token_ids:
            self.completion_tokens.inc(len(received.token_ids))
            if ticket.last_piece is None:
                self._first_token.observe(now - ticket.submitted)
            else:
                gap = (now - ticket.last_piece) / len(received.token_ids)
                for _ in received.token_ids:
                    self._inter_token.observe(gap)
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
        self._drafts.inc(tried[0])
        self._draft_tokens.inc(sum(tried))
        self._accepted_tokens.inc(sum(accepted))
        for position, count in enumerate(accepted):
            if count:
                self._accepted_per_position.labels(self._model, str(position)).inc(count)

    def observe_release(self, nbytes: int) -> None:
        """Count that spare buffers were given back."""
        self._releases.inc()
        self._released_bytes.inc(nbytes)

    def mean_seconds(self) -> float:
        """Mean time an answer took; 1 before there was one."""
        return self._seconds / self._finished if self._finished else 1.0

    def _observe_result(self, result: Generation) -> None:
        timings = result.timings
        self._answers.labels(self._model, result.finish_reason).inc()
        self._prompt_tokens.inc(result.usage.prompt_tokens)
        if timings.tokens_per_second:
            self._rate.observe(timings.tokens_per_second)


def _new(counts: Sequence[int], before: Sequence[int]) -> list[int]:
    """What came to counts by position, of which there may be more than before."""
    return [now - then for now, then in zip_longest(counts, before, fillvalue=0)]
