"""Guards /metrics in the middle of an answer: a scrape then must tell the truth, too."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import httpx
import pytest

from selfdraft.llm import LLM

from .conftest import Running, running, within
from .steps import Steps, scripted

TEXT = "one two three four five six seven eight nine ten eleven twelve"


def scrape(client: httpx.Client) -> dict[str, float]:
    """Every sample of a scrape but its buckets, by name and labels but that of the one model."""
    return {
        re.sub(r'model_name="nano",?', "", name).replace("{}", ""): float(value)
        for name, value in re.findall(r"^([^#\s]\S*) (\S+)$", client.get("/metrics").text, re.MULTILINE)
        if "_bucket{" not in name
    }


def since(client: httpx.Client, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in scrape(client).items()}


def test_counts_rise_as_the_cycles_happen(load_nano: Callable[[], LLM]) -> None:
    steps = Steps()
    body = {"model": "m", "prompt": "Count:", "max_tokens": 40, "temperature": 0, "depth": 3, "stream": True}
    with (
        running(steps.hold(scripted(load_nano, TEXT))) as server,
        server.client() as client,
        server.client() as other,
        steps.running_at_end(),
    ):
        before = scrape(other)

        def tokens() -> float:
            return since(other, before)["selfdraft_generation_tokens_total"]

        with client.stream("POST", "/v1/completions", json=body):
            begin = time.perf_counter()
            steps.allow(2)  # the prompt's, the last token of which goes alone
            assert within(20, lambda: tokens() == 1)
            time.sleep(0.3)
            steps.allow(2)
            assert within(20, lambda: tokens() == 1 + 2 * 4)
            found = since(other, before)
            assert found["selfdraft_num_requests_running"] == 1
            assert found["spec_decode_num_drafts_total"] == 2
            assert found["spec_decode_num_draft_tokens_total"] == found["spec_decode_num_accepted_tokens_total"] == 6
            for position in range(3):
                assert found[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'] == 2
            assert found["selfdraft_time_to_first_token_seconds_count"] == 1
            assert found["selfdraft_inter_token_seconds_count"] == 8
            # All tokens of a cycle together took the time since the cycle before, not each of them.
            assert 0.3 < found["selfdraft_inter_token_seconds_sum"] < time.perf_counter() - begin


@pytest.mark.parametrize("depth", [0, 2])
def test_after_an_answer_counts_and_its_timings_agree(server: Running, depth: int) -> None:
    body = {"model": "m", "prompt": "Hello", "max_tokens": 30, "ignore_eos": True, "depth": depth}
    with server.client() as client:
        before = scrape(client)
        timings = client.post("/v1/completions", json=body).json()["timings"]
        found = since(client, before)
    assert found["spec_decode_num_draft_tokens_total"] == sum(timings["drafts_tried"])
    assert found["spec_decode_num_accepted_tokens_total"] == sum(timings["drafts_accepted"])
    assert found["spec_decode_num_drafts_total"] == (timings["drafts_tried"] or [0])[0]
    assert found["selfdraft_inter_token_seconds_count"] == 29
