"""Faults to plant: each breaks one rule of the project. Knows no test runner."""

from __future__ import annotations

from .disk import FAULTS as DISK
from .doctor import FAULTS as DOCTOR
from .engine import FAULTS as ENGINE
from .fans import FAULTS as FANS
from .fault import Fault
from .forge import FAULTS as FORGE
from .forge_head import FAULTS as FORGE_HEAD
from .hub import FAULTS as HUB
from .hybrids import FAULTS as HYBRIDS
from .kernels import FAULTS as KERNELS
from .memory import FAULTS as MEMORY
from .models import FAULTS as MODELS
from .modules import FAULTS as MODULES
from .products import FAULTS as PRODUCTS
from .retrieval import FAULTS as RETRIEVAL
from .server import FAULTS as SERVER
from .sessions import FAULTS as SESSIONS
from .tuning import FAULTS as TUNING

__all__ = ["FAULTS", "Fault"]

FAULTS = [
    *ENGINE,
    *SERVER,
    *SESSIONS,
    *DISK,
    *KERNELS,
    *PRODUCTS,
    *MODELS,
    *MODULES,
    *HYBRIDS,
    *TUNING,
    *MEMORY,
    *DOCTOR,
    *HUB,
    *FANS,
    *FORGE,
    *FORGE_HEAD,
    *RETRIEVAL,
]
