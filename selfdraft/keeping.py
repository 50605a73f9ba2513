"""Connects a model's session bank with the folder on disk. Knows what a stored state hangs on; decides nothing else."""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from .llm import LLM
from .sessions.disk.store import DiskFigures, DiskStore, Record, Stored
from .sessions.identity import identity

__all__ = ["DiskSessions"]

log = logging.getLogger(__name__)

NOTEBOOK = "digests.json"


class DiskSessions:
    """Warm prefixes of a model on disk, from the moment its files are known; until then it goes without.

    Reading gigabytes of weights for their digest takes seconds, once: a thread does it.

    Args:
        llm: its settings say where, how much, and whether at all.
        busy: whether requests run, which go before writing.
    """

    def __init__(self, llm: LLM, *, busy: Callable[[], bool] = lambda: False) -> None:
        self._llm = llm
        self._busy = busy
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
            max_pending=self._llm.sessions.limit // 4,  # what waits may have left the bank meanwhile
        )
        records = store.records()
        self._remember(records)
        with self._lock:
            if self._closing:
                store.close(0)
                return
            self._store = store
        self._llm.sessions.attach(store, records)

    def _remember(self, records: Sequence[tuple[Record, Stored]]) -> None:
        """Texts of the conversations on disk."""
        ids: dict[str | None, np.ndarray[Any, np.dtype[np.int32]]] = {None: np.zeros(0, dtype=np.int32)}
        for record, _ in records:
            ids[record.key] = np.concatenate([ids[record.parent], record.ids])
            if record.reply:
                self._llm.prompts.recall(record.scope, ids[record.key].tolist())


def _facts(llm: LLM) -> dict[str, object]:
    """What the bits of a state hang on beside the checkpoint's files."""
    described = llm.describe()
    return {
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "machine": [platform.machine(), platform.processor(), mx.device_info().get("architecture", "")],
        "head": llm.loaded.model.max_depth > 0,
        **{name: described[name] for name in ("device", "blas", "dtype", "quantisation")},
    }
