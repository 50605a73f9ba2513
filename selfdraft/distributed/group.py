"""The processes that hold one model together, and what passes between them on the device. Knows no model, no socket.

Ranks must run the same collectives in the same order. Inside a forward each hangs on the one before it; between
forwards `Group` makes it so, for MLX evaluates lazily and each rank another graph.
"""

from __future__ import annotations

import mlx.core as mx

from ..errors import SelfdraftError
from .environment import Backend

__all__ = ["Group"]


class Group:
    """Implements `models.sharding.Ranks`.

    Attributes:
        backend: what carries the messages.
        collectives: how many were built so far.
        bytes: what a ring sends of them from each rank.
    """

    def __init__(self, group: mx.distributed.Group, backend: str) -> None:
        self._group = group
        self._newest: mx.array | None = None
        self.rank, self.size, self.backend = group.rank(), group.size(), backend
        self.collectives = self.bytes = 0

    @classmethod
    def join(cls, backend: Backend) -> Group:
        """Meet the other ranks.

        Raises:
            SelfdraftError: this MLX has no such back end; the ranks do not meet.
        """
        if not mx.distributed.is_available(backend):
            raise SelfdraftError(
                f"this build of MLX has no back end {backend!r}: ring is in every one, nccl in those for CUDA, "
                "jaccl on macOS 26.2 and later"
            )
        try:
            return cls(mx.distributed.init(strict=True, backend=backend), backend)
        except (RuntimeError, ValueError) as error:
            raise SelfdraftError(
                f"the ranks of the group do not meet over {backend} ({error}): check that each machine of the host "
                "file is on, that its address is right, and that nothing else uses the ports"
            ) from error

    def sum(self, x: mx.array) -> mx.array:
        """See `Ranks.sum`."""
        self._count(2 * (self.size - 1) * x.nbytes // self.size)
        return mx.distributed.all_sum(x, group=self._group)

    def gather(self, x: mx.array) -> mx.array:
        """See `Ranks.gather`."""
        self._count((self.size - 1) * x.nbytes)
        parts = mx.distributed.all_gather(x[None], group=self._group)
        return mx.moveaxis(parts, 0, -2).reshape(*x.shape[:-1], -1)

    def share(self, x: mx.array) -> mx.array:
        """What rank 0 has, on every rank, behind all that was shared or passed to `follow` before.

        Args:
            x: on the other ranks, an array of the same shape and dtype.
        """
        mine = x if self.rank == 0 else mx.zeros_like(x)
        self._newest = self.sum(mine if self._newest is None else mx.depends(mine, [self._newest]))
        return self._newest

    def follow(self, x: mx.array) -> None:
        """Have what is shared next come behind x, the output of a forward."""
        self._newest = x

    def _count(self, nbytes: int) -> None:
        self.collectives += 1
        self.bytes += nbytes
