"""From a source checkpoint to a package that runs: probe, build, verify, publish.

Goes by the one classifier (`models.checkpoint`). A package is an ordinary model folder, quantised as MLX does it, with
the head in a shard of its own and `selfdraft.json` beside it.
"""

from .build import build
from .probe import probe
from .publish import publish
from .recipe import Recipe
from .verify import verify

__all__ = ["Recipe", "build", "probe", "publish", "verify"]
