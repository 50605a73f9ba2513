"""What holds for all tests: reference BLAS, for which bit parity is claimed, and no deadlines on slow machines."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("SELFDRAFT_BLAS", "reference")

from selfdraft.device import choose_blas  # before MLX is imported
from selfdraft.settings import load_settings

choose_blas(load_settings().blas)

settings.register_profile("selfdraft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("selfdraft")
