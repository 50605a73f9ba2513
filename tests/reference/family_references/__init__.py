"""What other code computes from the checkpoints of `families`, in float32: a module a family, with torch.

Knows nothing of Selfdraft or MLX, but where transformers lacks a trunk: such a module says so.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from tests.reference.family_references.reference import Reference

__all__ = ["reference_of"]


def reference_of(name: str, folder: Path) -> Reference:
    """The reference of a family's checkpoint in a folder."""
    for module in pkgutil.iter_modules(__path__):
        if module.name == "reference":
            continue
        found = importlib.import_module(f"{__name__}.{module.name}").REFERENCES.get(name)
        if found is not None:
            made: Reference = found(folder)
            return made
    raise KeyError(f"no reference for {name}")
