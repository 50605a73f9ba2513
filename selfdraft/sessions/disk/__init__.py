"""Boundaries on disk: content-addressed blobs and an index of records, behind `store.DiskStore`.

From the bottom: `folder` (files and lock), `index` (rows), `archive` (both together, under a cap), `tensors` (arrays as
bytes), `store` (what the bank sees: a queue and a thread that writes), `upkeep` (what the command line does). Only
`tensors` and `store` import MLX, so nothing is imported here.
"""
