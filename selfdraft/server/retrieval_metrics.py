"""Prometheus metrics of embedding models and rerankers. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["RetrievalMetrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class _Levels(Collector):
    """What is so when asked."""

    def __init__(self, states: Callable[[], Mapping[str, str]], count: Callable[[], int]) -> None:
        self._states = states
        self._count = count

    def collect(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily("selfdraft_retrieval_loaded", "1 while a model is loaded", labels=["model"])
        for name, state in self._states().items():
            loaded.add_metric([name], float(state == "loaded"))
        yield loaded
        yield GaugeMetricFamily("selfdraft_retrieval_requests", "requests that run and wait", value=self._count())


class RetrievalMetrics:
    """Counters, by the names of models, in a server's registry.

    Attributes:
        texts, tokens: that were read.
        seconds: from the arrival of a request to its vectors or scores, loading included.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.texts = Counter(
            "selfdraft_retrieval_texts", "texts embedded and documents scored", ["model"], registry=registry
        )
        self.tokens = Counter("selfdraft_retrieval_tokens", "tokens read for that", ["model"], registry=registry)
        self.seconds = Histogram(
            "selfdraft_retrieval_seconds",
            "time of a request, loading included",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )

    def observe(self, model: str, texts: int, tokens: int) -> None:
        """Count what a request had read."""
        self.texts.labels(model).inc(texts)
        self.tokens.labels(model).inc(tokens)

    def watch(self, states: Callable[[], Mapping[str, str]], count: Callable[[], int]) -> None:
        """Tell, at every scrape, which models are loaded and how many requests there are."""
        self._registry.register(_Levels(states, count))
