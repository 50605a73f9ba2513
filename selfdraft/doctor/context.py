"""What checks share: what was asked for, the settings, and whether MLX can be used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..device import Blas, choose_blas
from ..errors import InvalidRequest, SelfdraftError

if TYPE_CHECKING:
    from ..server.config import ServerSettings
    from ..settings import StoredSettings

__all__ = ["Context"]

_PATIENCE = 120.0  # seconds for MLX to start; a device that hangs takes for ever

# In a process of its own: a library that does not fit the machine may end the process that imports it.
_PROBE = """
from selfdraft.device import choose_blas
choose_blas("auto")
import mlx.core as mx
product = mx.ones((8, 8)) @ mx.ones((8, 8))
assert product[0, 0].item() == 8, f"a product of ones is {product[0, 0].item()}, not 8"
"""


class Context:
    """One run of the doctor.

    Args:
        kinds: gives the classes of settings; called by checks, for it may fail, too.
        model: name of a model to look at.
        parity: whether to measure the parity matrix.

    Attributes:
        blas_problem: why the BLAS that was asked for is not in use; empty if it is.
    """

    def __init__(
        self, kinds: Callable[[], Sequence[type[StoredSettings]]], *, model: str | None = None, parity: bool = False
    ) -> None:
        self.kinds = kinds
        self.model = model
        self.parity = parity
        self.blas_problem = ""

    @cached_property
    def settings(self) -> ServerSettings:
        """The engine's and the server's settings; defaults where they cannot be read, which a check of its own says."""
        from ..server.config import ServerSettings, load_server_settings

        try:
            return load_server_settings()
        except InvalidRequest:
            return ServerSettings.model_construct()

    @cached_property
    def mlx_problem(self) -> str:
        """Why MLX cannot be used; empty if it can. Once it is known, the BLAS is chosen, before checks import MLX."""
        problem = _probed()
        if not problem:
            self.blas_problem = _blas_problem(self.settings.blas)
        return problem


def _probed() -> str:
    """Why MLX cannot be used, tried in another process."""
    parent = str(Path(__file__).resolve().parent.parent.parent)
    paths = [parent, os.environ.get("PYTHONPATH", "")]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not answer within {_PATIENCE:.0f} s"
    if done.returncode < 0:
        return f"it ends the process by signal {-done.returncode}"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"it ends the process with code {done.returncode}"
    return ""


def _blas_problem(wanted: Blas) -> str:
    try:
        choose_blas(wanted)
    except SelfdraftError as error:
        return str(error)
    return ""
