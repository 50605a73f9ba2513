"""What a prompt has beside its ids, such as pictures. The engine hands it from the request to the model, cut at the
chunks of a prefill, and does not understand it.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Protocol

__all__ = ["Inputs"]


class Inputs(Sized, Protocol):
    """Of one prompt; several rows may share it. Its length is that of the prompt. Of the prompt's last two tokens it
    says nothing that they would not be without it.

    Attributes:
        nbytes: most bytes that it holds while its rows are in prefill.
        working_bytes: most bytes beside these that `prepare` takes.
    """

    @property
    def nbytes(self) -> int:
        """See above."""

    @property
    def working_bytes(self) -> int:
        """See above."""

    def prepare(self, start: int, end: int) -> bool:
        """Make one thing ready that tokens start .. end - 1 need.

        Returns:
            Whether there was one; to be called again then.
        """

    def rope_delta(self, length: int) -> int:
        """What is added to the number of a token, from `length` on, for its rotary position, up to the next token that
        `trunk` says something of."""

    def trunk(self, start: int, end: int) -> dict[str, Any]:
        """Keywords of `Model.forward` for tokens start .. end - 1; none where these are as usual."""

    def head(self, start: int, end: int) -> dict[str, Any]:
        """Keywords of `Model.draft` for the pairs of tokens start .. end - 1."""
