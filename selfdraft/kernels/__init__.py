"""Kernels: plain-MLX references of what the models need beyond mlx's own operations.

Arrays in, arrays out: nothing here knows of rows, caches or models.
"""
