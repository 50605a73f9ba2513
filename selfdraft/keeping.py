"""Connects a model's session bank with the folder on disk. Knows what a stored state hangs on; decides nothing else."""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version

import mlx.core as mx

from .kernels.portable import sources_digest
from .llm import LLM
from .sessions.disk.shared import Shared
from .sessions.disk.store import DiskFigures, DiskStore, Record
from .sessions.identity import identity
from .sessions.transcripts import TEXT_BYTES

__all__ = ["DiskSessions"]

log = logging.getLogger(__name__)

NOTEBOOK = "digests.json"

_BYTES_A_TOKEN = 8  # of a text and its ids, about


class DiskSessions:
    """Warm prefixes of a model on disk, from the moment its files are known; until then it goes without.

    Reading gigabytes of weights for their digest takes seconds, once: a thread does it.

    Args:
        llm: its settings say where, how much, and whether at all.
        busy: whether requests run, which go before writing.
        owners: how many scopes there may be.
        shared: of all models of this process.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        busy: Callable[[], bool] = lambda: False,
        owners: int = 1,
        shared: Shared | None = None,
    ) -> None:
        self._llm = llm
        self._shared = shared
        self._busy = busy
        self._owners = owners
        self._store: DiskStore | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._open, name="session-cache", daemon=True)
        if llm.sessions is not None and llm.settings.ssd_session_cache != "off":
            self._thread.start()

    @property
    def figures(self) -> DiskFigures | None:
        """What the disk holds and did; None while there is none."""
        return self._store.figures if self._store else None

    def ready(self, timeout: float) -> bool:
        """Wait until what is on disk can be used; False if that does not come to be in time."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return self._store is not None

    def save(self, timeout: float) -> None:
        """Have what is only in memory written, too, before `close`: the model leaves, and nothing uses it any more.

        Args:
            timeout: seconds to wait for the model's files to be known, if they are not yet.
        """
        if self._llm.sessions is not None and self._llm.session_bytes and self.ready(timeout):
            self._llm.sessions.store_all()

    def close(self, timeout: float = 10.0) -> None:
        """Write what waits to be written, for so many seconds at most."""
        with self._lock:
            self._closing = True
        if self._store is not None:
            self._store.close(timeout)

    def _open(self) -> None:
        settings = self._llm.settings
        assert self._llm.sessions is not None
        folder = settings.session_folder
        try:
            digest = identity(self._llm.checkpoint.folder, _facts(self._llm), folder / NOTEBOOK)
        except OSError as error:
            log.warning("nothing is kept on disk: the model's files cannot be read (%s)", error)
            return
        store = DiskStore(
            folder,
            digest,
            max_bytes=settings.ssd_session_cache_max_bytes,
            writes_per_hour=settings.ssd_session_cache_hourly,
            model=self._llm.name,
            read=settings.ssd_session_cache == "on",
            busy=self._busy,
            owners=self._owners,
            kv_bits=8 if settings.ssd_session_cache_kv == "8bit" else None,
            max_pending=self._llm.sessions.limit // 4,  # what waits may have left the bank meanwhile
            shared=self._shared,
        )
        records = store.records()
        with self._lock:
            if self._closing:
                store.close(0)
                return
            self._store = store
        self._llm.sessions.attach(store, records)
        self._remember([record for record, _ in records])

    def _remember(self, records: Sequence[Record]) -> None:
        """Texts of the conversations on disk, of those used last as many as may be held."""
        known = {record.key: record for record in records}
        chosen: list[tuple[str, list[int]]] = []
        room = TEXT_BYTES // _BYTES_A_TOKEN
        for record in sorted((record for record in records if record.reply), key=lambda each: -each.used):
            ids = _tokens(record, known)
            room -= len(ids)
            if room < 0:
                break
            chosen.append((record.scope, ids))
        for scope, ids in reversed(chosen):  # the last one used is the last to be forgotten
            self._llm.prompts.recall(scope, ids)


def _tokens(record: Record, known: Mapping[str, Record]) -> list[int]:
    """All ids of a record, of what it stands behind, too."""
    path = [record]
    while path[-1].parent:
        path.append(known[path[-1].parent])
    return [token for each in reversed(path) for token in each.ids.tolist()]


def _facts(llm: LLM) -> dict[str, object]:
    """What the bits of a state hang on beside the checkpoint's files."""
    described = llm.describe()
    return {
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "mlx_vlm": version("mlx-vlm") if llm.vision else None,
        "machine": [platform.machine(), platform.processor(), mx.device_info().get("architecture", "")],
        "head": llm.loaded.model.max_depth > 0,
        "kernels": [*described["kernels"], sources_digest()] if described["kernels"] else [],
        **({"adapter": llm.adapter.digest} if llm.adapter else {}),
        **{name: described[name] for name in ("device", "blas", "dtype", "quantisation")},
    }
