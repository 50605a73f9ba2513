"""The reference checkpoint, loaded once a worker."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.support.reference import reference_model


@pytest.fixture(scope="session")
def reference_bf16() -> Any:
    return reference_model(dtype=mx.bfloat16)


@pytest.fixture(scope="session")
def reference_fp32() -> Any:
    return reference_model(dtype=mx.float32)
