"""What MLX reads of the environment when it is imported, set as `selfdraft.load` sets it: import this before MLX."""

from __future__ import annotations

import os

from selfdraft.device import choose_blas

choose_blas("auto")

# For us and for mlx-lm alike.
ENVIRONMENT = {name: value for name, value in sorted(os.environ.items()) if name.startswith("MLX_M")}
