"""One model on several processes or machines: tensor parallelism over `mlx.distributed` (docs/scaling.md).

Rank 0 has the engine and is told to in the same way as alone; the others run the forwards that it tells them.
"""
