"""What a planted fault is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Fault"]


@dataclass(frozen=True)
class Fault:
    """One line replaced in one file, and the tests that ought to notice.

    Attributes:
        name: what is broken.
        path: file, from selfdraft/ on; ../tools/release/ has programs with rules of their own.
        right, wrong: the text as it is (it must occur exactly once) and the fault.
        tests: pytest arguments.
    """

    name: str
    path: str
    right: str
    wrong: str
    tests: str
