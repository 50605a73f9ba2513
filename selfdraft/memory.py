"""How much memory is free and used. Imports MLX."""

from __future__ import annotations

import mlx.core as mx
import psutil

__all__ = ["free_memory", "used_memory"]


def free_memory() -> int:
    """Bytes the default device could still give."""
    if mx.default_device() == mx.gpu:
        info = mx.device_info()
        most = info.get("max_recommended_working_set_size") or info.get("memory_size")
        if most:
            return max(int(most) - mx.get_active_memory(), 0)
    return int(psutil.virtual_memory().available) + mx.get_cache_memory()


def used_memory() -> dict[str, int]:
    """Bytes by kind: of this process, of MLX's arrays, and of buffers that MLX keeps for its next arrays."""
    return {
        "resident": int(psutil.Process().memory_info().rss),
        "arrays": mx.get_active_memory(),
        "array_cache": mx.get_cache_memory(),
    }
