"""Guards /openapi.json against the server: requests made from it meet no 5xx, and answers are as it says.

A longer run, with the borders of every field: TESTS_FUZZ=200 pytest tests/clients/test_schemathesis.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.server.conftest import Running
from tests.server.test_server_fuzz import fuzzed

from .conftest import Client

__all__ = ["fuzzed"]  # a fixture: its answers are short, and at its end it looks for what is left behind

LONG = "TESTS_FUZZ" in os.environ
EXAMPLES = os.environ.get("TESTS_FUZZ", "10")


@pytest.fixture(scope="module")
def report(fuzzed: Running, outside: Client) -> dict[str, Any]:
    phases = "examples,coverage,fuzzing" if LONG else "examples,fuzzing"
    return outside("scripts/with_schemathesis.py", fuzzed.url, EXAMPLES, phases, timeout=7200 if LONG else 240)


def test_nothing_is_at_fault(report: dict[str, Any]) -> None:
    assert report["exit_code"] == 0, report["output"]
    assert report["failures"] == report["errors"] == []
    assert report["stop_reason"] == "completed"
    assert report["test_cases"]["generated"] > 80


def test_every_operation_was_tried_and_answered(report: dict[str, Any], fuzzed: Running) -> None:
    with fuzzed.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
    operations = {f"{method.upper()} {path}" for path, entry in paths.items() for method in entry}
    answered = {
        operation for operation, phases in report["valid_rates"].items() if any(phases[p]["accepted"] for p in phases)
    }
    assert report["operations"]["tested"] == len(operations)
    assert answered == operations
