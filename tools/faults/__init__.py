"""Faults to plant: each breaks one rule of the project. Knows no test runner."""

from __future__ import annotations

from .adapters import FAULTS as ADAPTERS
from .disk import FAULTS as DISK
from .distributed import FAULTS as DISTRIBUTED
from .docs import FAULTS as DOCS
from .doctor import FAULTS as DOCTOR
from .engine import FAULTS as ENGINE
from .fans import FAULTS as FANS
from .fault import Fault
from .forge import FAULTS as FORGE
from .forge_head import FAULTS as FORGE_HEAD
from .hub import FAULTS as HUB
from .hybrids import FAULTS as HYBRIDS
from .images import FAULTS as IMAGES
from .kernels import FAULTS as KERNELS
from .memory import FAULTS as MEMORY
from .models import FAULTS as MODELS
from .modules import FAULTS as MODULES
from .packaging import FAULTS as PACKAGING
from .products import FAULTS as PRODUCTS
from .retrieval import FAULTS as RETRIEVAL
from .server import FAULTS as SERVER
from .sessions import FAULTS as SESSIONS
from .several import FAULTS as SEVERAL
from .tray import FAULTS as TRAY
from .tuning import FAULTS as TUNING
from .vision import FAULTS as VISION

__all__ = ["FAULTS", "Fault"]

FAULTS = [
    *ENGINE,
    *SERVER,
    *SEVERAL,
    *IMAGES,
    *SESSIONS,
    *DISK,
    *DISTRIBUTED,
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
    *VISION,
    *PACKAGING,
    *TRAY,
    *ADAPTERS,
    *DOCS,
]
