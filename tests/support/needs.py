"""What a test needs and a machine may lack. CI lacks nothing: there TESTS_SKIP_NOTHING=1 makes a skip a failure."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

__all__ = ["lacking"]


def lacking(reason: str) -> NoReturn:
    """Skip the test, or the module that asks while it is collected."""
    if os.environ.get("TESTS_SKIP_NOTHING"):
        pytest.fail(f"TESTS_SKIP_NOTHING is set, but {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)
