"""Bit parity is claimed for MLX's reference BLAS, so the tests choose it before MLX is imported."""

from __future__ import annotations

import os

os.environ.setdefault("SELFDRAFT_BLAS", "reference")

from selfdraft.device import choose_blas
from selfdraft.settings import load_settings

choose_blas(load_settings().blas)
