"""`selfdraft run`: one answer, as text or as one JSON object whose figures agree with each other."""

from __future__ import annotations

import json
import math
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from selfdraft import Generation, SamplingParams
from selfdraft.llm import LLM

from .conftest import COMMAND, Command

QUESTION = "Hello! Who are you?"
TIMINGS = {
    "prompt_ms",
    "decode_ms",
    "tokens_per_second",
    "cycles",
    "tokens_per_cycle",
    "acceptance_per_position",
    "drafts_tried",
    "drafts_accepted",
    "emitted",
    "trunk_forwards",
    "trunk_replays",
}


def run_json(inside: Command, *arguments: str) -> dict[str, Any]:
    ended = inside("run", "--json", *arguments)
    assert (ended.code, ended.err) == (0, "")
    body: dict[str, Any] = json.loads(ended.out)  # exactly one object
    return body


def check_definitions(body: dict[str, Any], *, chunks: int) -> None:
    """The definitions of the figures, one against the other."""
    assert body["schema_version"] == 1
    assert set(body["usage"]) == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    timings, completion = body["timings"], body["usage"]["completion_tokens"]
    assert set(timings) == TIMINGS
    emitted = timings["emitted"]
    assert emitted["prefill"] == 1
    assert sum(emitted.values()) == completion
    assert timings["tokens_per_cycle"] == pytest.approx((completion - 1) / timings["cycles"], abs=1e-4)
    assert timings["tokens_per_second"] == pytest.approx((completion - 1) / timings["decode_ms"] * 1e3, rel=1e-3)
    rates = [a / t for a, t in zip(timings["drafts_accepted"], timings["drafts_tried"], strict=True) if t]
    assert timings["acceptance_per_position"] == pytest.approx(rates, abs=1e-4)
    assert timings["trunk_forwards"] == chunks + timings["cycles"]
    assert timings["trunk_replays"] == 0
    assert timings["prompt_ms"] > 0


def test_json_of_an_answer_that_ends_by_itself(inside: Command, llm: LLM) -> None:
    body = run_json(inside, "--temperature", "0", "--depth", "3", QUESTION)
    assert set(body) == {"schema_version", "text", "finish_reason", "usage", "timings"}
    assert body["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == len(llm.tokens(QUESTION))
    direct = llm.generate(QUESTION, SamplingParams(temperature=0, depth=3))
    assert body["text"] == direct.text
    # The end token counts, and is no text.
    assert body["usage"]["completion_tokens"] == len(llm.tokenizer.encode(direct.text, special=False)) + 1
    assert direct.token_ids[-1] in llm.tokenizer.eos_ids
    check_definitions(body, chunks=2)
    assert len(body["timings"]["acceptance_per_position"]) <= 3


def test_json_of_plain_decoding_cut_short(inside: Command) -> None:
    body = run_json(inside, "--depth", "0", "--max-tokens", "5", "--ignore-eos", QUESTION)
    assert body["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 5
    check_definitions(body, chunks=2)
    assert body["timings"]["cycles"] == body["timings"]["emitted"]["plain"] == 4
    assert body["timings"]["acceptance_per_position"] == []


def test_logprobs(inside: Command) -> None:
    body = run_json(inside, "--logprobs", "2", "--temperature", "0", "--max-tokens", "4", QUESTION)
    assert len(body["logprobs"]) == 4
    for entry in body["logprobs"]:
        assert set(entry) == {"token_id", "token", "logprob", "top", "offset", "bytes"}
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert body["text"].startswith(entry["token"], entry["offset"])
        best, second = (value for _, _, value, _ in entry["top"])
        assert entry["logprob"] == best >= second
        assert best <= 0 < math.exp(best)
    assert "".join(entry["token"] for entry in body["logprobs"]) == body["text"]


def test_every_sampling_flag_arrives(inside: Command, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []
    stream = llm.stream

    def spy(prompt: Any, params: SamplingParams, **options: Any) -> Any:
        seen.append(params)
        return stream(prompt, params, **options)

    monkeypatch.setattr(llm, "stream", spy)
    flags = (
        "--depth 2 --max-tokens 2 --temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --presence-penalty 0.2 "
        "--frequency-penalty 0.3 --repetition-penalty 1.1 --logit-bias 5=-1 --logit-bias 6=2.5 --seed 9 --stop A "
        "--stop B --logprobs 1 --ignore-eos --min-tokens 1"
    )
    run_json(inside, *flags.split(), QUESTION)
    assert seen == [
        SamplingParams(
            depth=2,
            max_tokens=2,
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            repetition_penalty=1.1,
            logit_bias={5: -1.0, 6: 2.5},
            seed=9,
            stop=("A", "B"),
            logprobs=1,
            ignore_eos=True,
            min_tokens=1,
        )
    ]


def test_prompts_reach_the_model_as_the_library_takes_them(inside: Command, llm: LLM) -> None:
    def prompt_tokens(*arguments: str, stdin: bytes = b"") -> int:
        ended = inside("run", "--json", "--max-tokens", "1", *arguments, stdin=stdin)
        count: int = json.loads(ended.out)["usage"]["prompt_tokens"]
        return count

    assert prompt_tokens(stdin=b"Hello there\n") == len(llm.tokens("Hello there"))
    assert prompt_tokens("-", stdin=b"Hello there\n") == len(llm.tokens("Hello there"))
    assert prompt_tokens("--raw", stdin=b"Hello there\n") == len(llm.tokens("Hello there\n", raw=True))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert prompt_tokens("--system", "Be brief.", "Hi") == len(llm.tokens(messages))
    assert prompt_tokens("--think", "Hi") == len(llm.tokens("Hi", enable_thinking=True))


def test_text_is_the_answer_and_a_newline(inside: Command, llm: LLM) -> None:
    ended = inside("run", "--temperature", "0", QUESTION)
    direct: Generation = llm.generate(QUESTION, SamplingParams(temperature=0))
    assert (ended.code, ended.out, ended.err) == (0, direct.text + "\n", "")


def test_a_request_the_model_cannot_serve(inside: Command) -> None:
    ended = inside("run", "--json", "--depth", "99", QUESTION)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "selfdraft: depth 99 is not possible here; allowed: 0..8, or auto\n"


def test_notes_go_to_standard_error(inside: Command, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "notes", ["plain decoding: no head"])
    ended = inside("run", "--json", "--max-tokens", "1", QUESTION)
    assert ended.err == "selfdraft: plain decoding: no head\n"
    json.loads(ended.out)


def test_a_template_without_thinking_is_said(inside: Command, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.template, "variables", frozenset())
    ended = inside("run", "--think", "--max-tokens", "1", QUESTION)
    assert "knows no thinking" in ended.err
    assert ended.code == 0


def test_a_process_with_trace(process: Command) -> None:
    ended = process("run", "--verbose", "--profile", "--json", "--prefill-chunk", "8", "--max-tokens", "4", QUESTION)
    assert ended.code == 0
    body = json.loads(ended.out)
    chunks = math.ceil((body["usage"]["prompt_tokens"] - 1) / 8) + 1
    check_definitions(body, chunks=chunks)
    log, *profile = ended.err.splitlines()
    assert log.startswith("selfdraft.engine.engine: row done: prompt_tokens=19 restored_tokens=0 emitted_tokens=4 ")
    assert profile[0].startswith("profile: ")
    assert [line.split()[0] for line in profile[1:]] == ["head", "draft", "verify", "accept", "commit", "host"]


def long_answer(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, "run", "--ignore-eos", "--max-tokens", "2000", QUESTION],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )


def test_ctrl_c_keeps_what_was_printed(environment: dict[str, str]) -> None:
    with long_answer(environment) as process:
        assert process.stdout is not None
        begin = process.stdout.read(8)  # it streams
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=180)
    assert process.returncode == 130
    assert (begin + rest).endswith(b"\n")
    assert err == b""


def test_a_reader_that_leaves_is_no_error(environment: dict[str, str]) -> None:
    with long_answer(environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        process.wait(timeout=180)
    assert process.returncode == 141


def test_help_into_head(environment: dict[str, str]) -> None:
    line = " ".join(COMMAND) + " run --help | head -n 1"
    done = subprocess.run(["sh", "-c", line], capture_output=True, env=environment, timeout=180, check=True)
    assert done.stderr == b""


def test_a_closed_standard_input(environment: dict[str, str], tmp_path: Path) -> None:
    line = " ".join(COMMAND) + " run <&-"
    done = subprocess.run(["sh", "-c", line], capture_output=True, env=environment, timeout=180, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"selfdraft: the prompt is empty; write something\n"
