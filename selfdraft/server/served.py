"""The chat models of a server: which there are, which are loaded, and engines for those who ask. Knows no HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

from ..errors import OutOfMemoryBudget, SelfdraftError
from ..llm import LLM
from ..memory import Holdings, free_memory
from ..sessions.disk.shared import Shared
from .config import ServerSettings
from .errors import LoadFailed, Loading, QueueFull
from .metrics import Figures, Metrics
from .pool import STAY, Entry, Lease, Pool
from .registry import Given, Registry
from .service import EngineService
from .turns import Turns

__all__ = ["Counts", "ServedModel", "ServedModels"]

log = logging.getLogger(__name__)

_SAVE_SECONDS = 30.0  # that warm prefixes of a model that leaves may take to get to the disk
_ROOM = 8  # weights need an eighth more: an answer must fit beside them


@dataclass(frozen=True)
class ServedModel:
    """A model that can be loaded.

    Attributes:
        given: its name, and what it is loaded as.
        weights: bytes of its weights; may look at files.
        load: makes it, on the thread of its engine; is given what says how much other models hold.
        beyond_repair: asked when its engine broke off: why nothing can be decoded any more, if that is so.
        pinned: whether it stays once it is loaded.
    """

    given: Given
    weights: Callable[[], int]
    load: Callable[[Callable[[], Holdings]], LLM]
    beyond_repair: Callable[[], SelfdraftError | None] = lambda: None
    pinned: bool = False


@dataclass(frozen=True)
class Counts:
    """What became of a model: whether it is loaded, how often it was loaded and unloaded, and could not be loaded."""

    loaded: bool
    loads: int
    unloads: int
    failures: int


class ServedModels:
    """Models that are loaded when they are asked for; the first at the start, unless `lazy`.

    Attributes:
        registry: the names that they answer to.
        pool: what is loaded.
        metrics: counts of all of them.
        failure: why the first could not be loaded at the start.
        on_failure: called then.
        others: bytes that whatever else is in this process holds; called from any thread.
        stopping: whether nothing new is taken any more.
    """

    def __init__(self, models: Sequence[ServedModel], settings: ServerSettings) -> None:
        self.registry = Registry(
            [model.given for model in models],
            settings.alias,
            lenient=settings.loopback and not settings.strict_model,
        )
        self.metrics = Metrics()
        self.metrics.watch(self._figures)
        self.pool = Pool(
            self.free,
            most_loaded=settings.max_loaded_models,
            idle_ttl=settings.idle_ttl or STAY,
            most_waiting=settings.rows + settings.queue,
        )
        self.failure: Exception | None = None
        self.on_failure: Callable[[], object] = lambda: None
        self.others: Callable[[], int] = lambda: 0
        self.stopping = False
        self._settings = settings
        self._owners = max(1, len(settings.keys()))
        self._turns = Turns()
        self._shared = Shared()
        self._started = settings.lazy
        self._starting: asyncio.Task[None] | None = None
        self._limits: dict[str, dict[str, Any]] = {}
        self._made: WeakSet[EngineService] = WeakSet()  # those that are being loaded, too
        self._entries = {model.given.name: self._entry(model) for model in models}
        for entry in self._entries.values():
            self.pool.add(entry)

    def _entry(self, model: ServedModel) -> Entry[EngineService]:
        return Entry(
            model.given.name,
            size=lambda: model.weights() * (_ROOM + 1) // _ROOM,
            open=partial(self._open, model),
            close=lambda service: service.stop(save_prefixes=0 if self.stopping else _SAVE_SECONDS),
            held=lambda service: service.holdings.total,
            pinned=model.pinned,
        )

    def start(self) -> None:
        """Load the first model, on the running event loop, if that is not left to the first request."""
        if not self._started:
            self._starting = asyncio.get_running_loop().create_task(self._load_first())

    async def _load_first(self) -> None:
        try:
            (await self.pool.use(next(iter(self._entries.values())))).release()
            self._started = True
        except Exception as error:
            self.failure = error
            self.on_failure()

    async def use(self, name: str | None, *, stay: float | None = None) -> Lease[EngineService]:
        """The engine of the model that a name means, which is loaded if it is not.

        Args:
            stay: see `Pool.use`.

        Raises:
            ModelNotFound: no such name. LoadFailed: it cannot be loaded; the log says why.
            QueueFull, NoRoom, OutOfMemoryBudget, Loading: see `Pool.use`.
        """
        model = self.registry.resolve(name).model
        if self.stopping:
            raise Loading("the server is shutting down")
        try:
            return await self.pool.use(self._entries[model], stay=stay)
        except (OutOfMemoryBudget, Loading, QueueFull):
            raise
        except Exception as error:
            raise LoadFailed(f"the model {model!r} could not be loaded; the server's log says why") from error

    def loaded(self, name: str) -> EngineService | None:
        """The engine of a model, to look at, if it is there."""
        return self.pool.thing(self._entries[name])

    @property
    def first(self) -> EngineService | None:
        """The engine of the first model, if it is there."""
        return self.loaded(self.registry.models[0])

    @property
    def services(self) -> list[EngineService]:
        """The engines that are there."""
        return [service for name in self._entries if (service := self.loaded(name)) is not None]

    @property
    def ready(self) -> bool:
        """Whether what is loaded at the start was."""
        return self._started

    @property
    def broken(self) -> bool:
        """Whether the first model could not be loaded at the start, or an engine broke down."""
        return self.failure is not None or any(service.failure is not None for service in self.services)

    @property
    def busy(self) -> bool:
        """Whether an answer runs or waits, or somebody waits for a model."""
        return self.pool.waiting > 0 or any(service.busy for service in self.services)

    @property
    def mode(self) -> str:
        """Of the engines; as it is set, as long as there is none."""
        return next((service.llm.mode for service in self.services if service.ready), self._settings.mode)

    @property
    def adapter(self) -> str | None:
        """What the first model's trunk was changed by, as long as it is there."""
        service = self.first
        adapter = service.llm.adapter if service is not None and service.ready else None
        return adapter.name if adapter else None

    @property
    def figures(self) -> dict[str, int]:
        """How many answers run and wait, of all models together; those that wait for a model wait, too."""
        of_each = [service.figures for service in self.services]
        running, waiting = (sum(figures[name] for figures in of_each) for name in ("running", "waiting"))
        return {"running": running, "waiting": waiting + self.pool.waiting}

    @property
    def memory_figures(self) -> dict[str, int]:
        """Bytes that all models may use, that the weights take, and that the answers which run may come to hold."""
        holdings = [service.holdings for service in self.services]
        figures = {
            "weights": sum(each.weights for each in holdings),
            "promised_to_rows": sum(each.rows for each in holdings),
        }
        return {"budget": max(service.budget for service in self.services), **figures} if holdings else figures

    def limits(self, name: str) -> dict[str, Any]:
        """A model's context, longest answer and depth, and whether it sees; empty as long as it was never loaded."""
        if (service := self.loaded(name)) is not None and service.ready:
            llm = service.llm
            self._limits[name] = {
                "max_model_len": llm.context_length,
                "max_input_tokens": llm.context_length,
                "max_output_tokens": llm.defaults["max_tokens"],
                "max_depth": llm.max_depth,
                "architecture": {
                    "input_modalities": ["text", "image"] if llm.vision else ["text"],
                    "output_modalities": ["text"],
                },
                "capabilities": {"image_input": {"supported": llm.vision}},
                "adapter": llm.adapter.describe() if llm.adapter else None,
            }
        return self._limits.get(name, {})

    def drain(self) -> None:
        """Take nothing new: what runs may finish."""
        self.stopping = True
        self.pool.drain()
        for service in self.services:
            service.drain()

    async def close(self) -> None:
        """End everything."""
        self.stopping = True
        await self.pool.close()

    def _open(self, model: ServedModel) -> EngineService:
        name = model.given.name
        service = EngineService(
            lambda: model.load(lambda: self._beside(name)),
            rows=self._settings.rows,
            waiting=self._settings.queue,
            metrics=self.metrics.of(name),
            owners=self._owners,
            turns=self._turns,
            shared=self._shared,
            busy=lambda: self.busy,
        )
        service.on_admitted = lambda: self._make_room(service)
        service.beyond_repair = model.beyond_repair
        self._made.add(service)
        return service.open()

    def fail(self, error: SelfdraftError) -> None:
        """End everything with an error, from any thread but an engine's, which may hang."""
        self.failure = error
        for service in list(self._made):
            service.fail(error)

    def free(self) -> int:
        """Bytes that something more could take now, under the one limit of all."""
        limit = self._settings.memory_limit
        return free_memory() if limit is None else limit - self.pool.held() - self.others()

    def _beside(self, name: str) -> Holdings:
        """What all but one hold; what is no chat model, and what is being loaded, counts as weights."""
        models = [service.holdings for each in self._entries if each != name and (service := self.loaded(each))]
        rows, prefixes = sum(each.rows for each in models), sum(each.prefixes for each in models)
        return Holdings(max(0, self.pool.held(but=name) + self.others() - rows - prefixes), rows, prefixes)

    def _make_room(self, admitted: EngineService) -> None:
        """Have warm prefixes of the other models give way to an answer."""
        for service in self.services:
            if service is not admitted:
                service.make_room()

    def _figures(self) -> Iterator[Figures]:
        for name in self._entries:
            yield "model", name, Counts(loaded=self.pool.state(name) == "loaded", **self.pool.counts(name))
        for name in self._entries:
            if (service := self.loaded(name)) is not None and (in_memory := service.session_figures) is not None:
                yield "session_cache", name, in_memory
        if on_disk := [figures for service in self.services if (figures := service.disk_figures) is not None]:
            read_bytes, damaged = (sum(getattr(each, name) for each in on_disk) for name in ("read_bytes", "damaged"))
            yield "session_disk", "", replace(on_disk[0], read_bytes=read_bytes, damaged=damaged)
