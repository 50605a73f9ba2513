"""Guards the figures that streams carry on request: with every piece, growing, and none for who does not ask."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Running

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})
COMPLETION = ("/v1/completions", {"prompt": "Hello"})


def chunks(server: Running, path: str, **given: Any) -> list[dict[str, Any]]:
    """Those of a streamed answer that have a choice."""
    body = {"model": "nano", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "depth": 2, "stream": True}
    with server.client() as client, client.stream("POST", path, json={**body, **given}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    found = [json.loads(line) for line in lines]
    return [chunk for chunk in found if chunk["choices"]]


def has_text(chunk: dict[str, Any]) -> bool:
    choice = chunk["choices"][0]
    return bool(choice.get("text") or choice.get("delta", {}).get("content"))


@pytest.mark.parametrize(("path", "given"), [CHAT, COMPLETION])
def test_every_piece_has_the_figures_so_far(server: Running, path: str, given: dict[str, Any]) -> None:
    found = chunks(server, path, timings_per_token=True, **given)
    figures = [chunk["timings"] for chunk in found if has_text(chunk)]
    assert len(figures) > 4
    cycles = [timings["cycles"] for timings in figures]
    assert cycles == sorted(set(cycles))
    assert all(set(timings) == set(found[-1]["timings"]) for timings in figures)
    assert all(timings["tokens_per_second"] > 0 for timings in figures if timings["cycles"])
    assert found[-1]["timings"]["cycles"] >= cycles[-1]
    assert sum(figures[-1]["drafts_tried"]) > 0


@pytest.mark.parametrize(("path", "given"), [CHAT, COMPLETION])
@pytest.mark.parametrize("asked", [{}, {"timings_per_token": False}])
def test_only_the_last_chunk_has_figures_unless_asked(
    server: Running, path: str, given: dict[str, Any], asked: dict[str, Any]
) -> None:
    found = chunks(server, path, **asked, **given)
    assert ["timings" in chunk for chunk in found] == [False] * (len(found) - 1) + [True]
