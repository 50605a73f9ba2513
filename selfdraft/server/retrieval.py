"""Embedding models and rerankers by name: loaded on request, run on a thread beside the engine's. Knows no HTTP.

A name from a request is looked up among those that were registered, and is never a path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..engine import leave_tidily
from ..errors import CheckpointError, InvalidRequest, ModelNotFound, OutOfMemoryBudget
from ..memory import release_buffers
from ..retrieval import Embedder, Plan, Reranker, check_installed, open_reranker, plan, refuse_generators
from ..source import find_model
from .config import ServerSettings
from .errors import LoadFailed, Loading, QueueFull
from .pool import STAY, Entry, Lease, Pool, State
from .registry import DEFAULT, Given
from .retrieval_metrics import RetrievalMetrics
from .served import ServedModels
from .stepper import Stepper

__all__ = ["Kind", "Named", "Retrieval", "retrieval_of"]

T = TypeVar("T")

Kind = Literal["embedding", "rerank"]

_FLAGS: dict[Kind, str] = {"embedding": "embedding_model", "rerank": "rerank_model"}
_DONE: dict[Kind, str] = {"embedding": "embeds", "rerank": "scores documents"}


@dataclass(frozen=True)
class Named:
    """A name that requests may say.

    Attributes:
        name: what they say.
        planned: the model that it means.
    """

    name: str
    kind: Kind
    planned: Plan


def retrieval_of(settings: ServerSettings, chat: ServedModels) -> Retrieval:
    """The models of a server's settings. Nothing is loaded or downloaded.

    Args:
        chat: models that write text, with which memory and counts are shared.

    Raises:
        InvalidRequest: a name that is none, or stands there twice.
        SelfdraftError: a model that is not here, or cannot be used as what it is given for; mlx-embeddings is not here.
    """
    models: list[Named] = []
    given: tuple[tuple[Kind, str], ...] = (
        *(("embedding", each) for each in settings.embedding_model),
        *(("rerank", each) for each in settings.rerank_model),
    )
    if given:
        check_installed()
    for kind, each in given:
        name, model = Given.parse(each)
        flag = _flag(kind)
        if name in (DEFAULT, *chat.registry.names, *(known.name for known in models)):
            raise InvalidRequest(
                f"{flag} {each!r}: another model has the name {name!r}; give it one of its own, NAME=MODEL",
                param=_FLAGS[kind],
            )
        try:
            planned = plan(find_model(model, fetch=False))
            if kind == "embedding":
                refuse_generators(planned)
        except ModelNotFound as error:
            raise ModelNotFound(f"{flag} {each!r}: {error}; `selfdraft pull OWNER/NAME` fetches one") from error
        except CheckpointError as error:
            raise CheckpointError(f"{flag} {each!r}: {error}") from error
        models.append(Named(name, kind, planned))
    waiting = settings.queue + 1
    pool = Pool(
        chat.free,
        most_loaded=settings.max_loaded_retrieval,
        idle_ttl=settings.idle_ttl or STAY,
        most_waiting=waiting,
    )
    chat.others = pool.held
    chat.pool.beside, pool.beside = pool, chat.pool
    chat.registry.silent = tuple(named.name for named in models)
    return Retrieval(models, chat.registry.names, pool, waiting, RetrievalMetrics(chat.metrics.registry))


def _flag(kind: Kind) -> str:
    return f"--{_FLAGS[kind].replace('_', '-')}"


class Retrieval:
    """The models, and the thread that runs them.

    Args:
        models: each under one of its names; names of the same folder and kind share what is loaded.
        chat: names of models that write text, to say that they do nothing else.
        pool: what loads them; empty.
        waiting: requests that run and wait.
        metrics: where counts go.
    """

    def __init__(
        self,
        models: Sequence[Named],
        chat: Sequence[str],
        pool: Pool,
        waiting: int,
        metrics: RetrievalMetrics,
    ) -> None:
        self.models = tuple(models)
        self.created = int(time.time())
        self._chat = tuple(chat)
        self._stepper = Stepper("retrieval", waiting)
        self._pool = pool
        self._entries: dict[tuple[Kind, Path], Entry[Any]] = {}
        for named in models:
            key = (named.kind, named.planned.folder.resolve())
            if key not in self._entries:
                self._entries[key] = _entry(named)
                self._pool.add(self._entries[key])
        self.metrics = metrics
        metrics.watch(lambda: self.states, lambda: self._stepper.count)

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return self._stepper.count + self._pool.waiting > 0

    def start(self) -> None:
        """Begin to take work."""
        if self.models:
            self._stepper.start()

    async def close(self) -> None:
        """Take no more work and unload everything. On the event loop."""
        self._stepper.stop()
        await self._pool.close()

    @property
    def states(self) -> dict[str, State]:
        """What has become of each model, by name."""
        return {named.name: self._pool.state(self._entry(named).name) for named in self.models}

    def loaded(self, named: Named) -> Embedder | Reranker | None:
        """A model, to look at, if it is loaded."""
        found: Embedder | Reranker | None = self._pool.thing(self._entry(named))
        return found

    def find(self, kind: Kind, name: str | None) -> Named:
        """The model that a request means; none named, or `DEFAULT`, is the first of the kind.

        Raises:
            InvalidRequest: a model of another kind. ModelNotFound: none of that name, or none at all.
        """
        known = [named for named in self.models if named.kind == kind]
        for named in known:
            if name in (named.name, None, DEFAULT):
                return named
        listed = f"there is {', '.join(named.name for named in known)}"
        there = listed if known else f"start the server with {_flag(kind)}"
        if name in self._chat:
            raise InvalidRequest(f"{name!r} writes text; no chat model {_DONE[kind]}: {there}", param="model")
        if name in [named.name for named in self.models]:
            raise InvalidRequest(f"{name!r} is a model of the other kind: {there}", param="model")
        if name in (None, DEFAULT):
            raise ModelNotFound(f"no model here {_DONE[kind]}: {there}")
        raise ModelNotFound(f"no model {str(name)[:200]!r} here that {_DONE[kind]}: {there}")

    async def run(self, named: Named, work: Callable[[Any], Generator[None, None, T]]) -> T:
        """The result of work with a model, which is loaded first if it is not there.

        Args:
            work: takes the model; each step is one forward.

        Raises:
            QueueFull: too many requests wait.
            OutOfMemoryBudget, NoRoom: there is no room for the model.
            LoadFailed: it cannot be loaded; the log says why.
            SelfdraftError: what the work raised.
        """
        self._stepper.check_room()
        begun = time.perf_counter()
        with await self._lease(named) as model:
            result = await self._stepper.run(work(model))
        self.metrics.seconds.labels(named.name).observe(time.perf_counter() - begun)
        return result

    async def _lease(self, named: Named) -> Lease[Any]:
        try:
            return await self._pool.use(self._entry(named))
        except (OutOfMemoryBudget, Loading, QueueFull):
            raise
        except Exception as error:
            raise LoadFailed(f"the model {named.name!r} could not be loaded; the server's log says why") from error

    def _entry(self, named: Named) -> Entry[Any]:
        return self._entries[named.kind, named.planned.folder.resolve()]


def _entry(named: Named) -> Entry[Any]:
    def open_model() -> Embedder | Reranker:
        leave_tidily()
        return Embedder(named.planned) if named.kind == "embedding" else open_reranker(named.planned)

    return Entry(named.name, lambda: named.planned.nbytes, open_model, lambda model: release_buffers())
