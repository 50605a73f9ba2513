"""Tiny random checkpoints of every family, as Hugging Face stores them: a module a family. Knows numpy alone.

Made anew from their names and seeds wherever they are needed, so that only what the references compute is kept.
"""

from __future__ import annotations

import importlib
import pkgutil

from tests.reference.families.family import Family

__all__ = ["FAMILIES", "Family"]


def _families() -> dict[str, Family]:
    names = [module.name for module in pkgutil.iter_modules(__path__) if module.name != "family"]
    found = [importlib.import_module(f"{__name__}.{name}").FAMILIES for name in names]
    return {family.name: family for families in found for family in families}


FAMILIES = _families()
