"""What a process of a group is told in its environment, by `mlx.launch` or by `launch.py`. Imports no MLX."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Literal, get_args

__all__ = ["BACKENDS", "Backend", "answers_requests", "leader_address", "rank", "started_in_group"]

Backend = Literal["ring", "nccl", "jaccl", "jaccl-ring", "mpi"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# What tells each back end's ranks how to meet.
_MARKS: dict[Backend, str] = {
    "jaccl": "MLX_IBV_DEVICES",
    "ring": "MLX_HOSTFILE",
    "nccl": "NCCL_HOST_IP",
    "mpi": "OMPI_COMM_WORLD_RANK",
}


def started_in_group(environment: Mapping[str, str] = os.environ) -> Backend | None:
    """The back end that this process was started for; None for a process that is alone."""
    if "MLX_RANK" not in environment and _MARKS["mpi"] not in environment:
        return None
    return next((backend for backend, mark in _MARKS.items() if mark in environment), None)


def rank(environment: Mapping[str, str] = os.environ) -> int:
    """Which of the processes this is."""
    return int(environment.get("MLX_RANK") or environment[_MARKS["mpi"]])


def answers_requests(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is alone or rank 0: the keys of clients, and what guards an address, are its business."""
    return started_in_group(environment) is None or rank(environment) == 0


def leader_address(backend: str, environment: Mapping[str, str] = os.environ) -> str:
    """Where the other ranks reach rank 0; on rank 0."""
    if backend == "ring":
        with open(environment["MLX_HOSTFILE"], encoding="utf-8") as file:
            address: str = json.load(file)[0][0]
        return address.rpartition(":")[0]
    if backend == "nccl":
        return environment["NCCL_HOST_IP"]
    if backend == "jaccl":
        return environment["MLX_JACCL_COORDINATOR"].rpartition(":")[0]
    return socket.gethostbyname(socket.gethostname())
