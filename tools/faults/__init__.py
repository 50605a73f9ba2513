"""Faults to plant: each breaks one rule of the project. Knows no test runner."""

from __future__ import annotations

from .disk import FAULTS as DISK
from .engine import FAULTS as ENGINE
from .fault import Fault
from .kernels import FAULTS as KERNELS
from .models import FAULTS as MODELS
from .products import FAULTS as PRODUCTS
from .server import FAULTS as SERVER
from .sessions import FAULTS as SESSIONS
from .tuning import FAULTS as TUNING

__all__ = ["FAULTS", "Fault"]

FAULTS = [*ENGINE, *SERVER, *SESSIONS, *DISK, *KERNELS, *PRODUCTS, *MODELS, *TUNING]
