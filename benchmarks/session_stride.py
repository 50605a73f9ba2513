"""What boundaries of a long prompt cost, by the distance between them: time of a cold prefill, bytes kept, and tokens
that a prompt which differs somewhere must forward again although they are the same.

A boundary lies at the end of a chunk, so smaller distances mean smaller chunks, too.

    usage: session_stride.py [--model NAME] [--tokens N] [--rounds N] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from selfdraft import load
from selfdraft.engine import Engine, Request
from selfdraft.llm import LLM
from selfdraft.params import SamplingParams
from selfdraft.sessions import PromptSession, SessionBank
from selfdraft.settings import load_settings

CHUNKS = (512, 1024, 2048, 4096, 8192)
FILLER = "The keeper wrote down the weather of the day, and what the light had burned. "


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="reference", help="reference, a folder, or a Hugging Face id")
    parser.add_argument("--tokens", type=int, default=16384, help="of the prompt (default 16384)")
    parser.add_argument("--rounds", type=int, default=3, help="of each (default 3)")
    parser.add_argument("--output", help="write the figures as JSON to this file")
    options = parser.parse_args()
    llm = load(options.model, settings=load_settings(session_cache_max_bytes=0))
    prompt = (llm.tokenizer.encode(FILLER, special=False) * options.tokens)[: options.tokens]
    times: dict[tuple[int, bool], list[float]] = {}
    sizes: dict[int, int] = {}
    for number in range(options.rounds):
        order = [(chunk, kept) for chunk in CHUNKS for kept in (False, True)]
        for chunk, kept in order if number % 2 == 0 else order[::-1]:
            bank = SessionBank(llm.loaded.model.new_state, 2**40) if kept else None
            times.setdefault((chunk, kept), []).append(_prefill(llm, chunk, prompt, bank))
            if bank:
                sizes[chunk] = bank.figures.bytes
    rows = [_row(chunk, times, sizes) for chunk in CHUNKS]
    print(f"{llm.name}, {llm.describe()['dtype']}, a prompt of {options.tokens} tokens; medians of {options.rounds}\n")
    print(f"{'distance':>8}{'plain s':>9}{'kept s':>9}{'MiB kept':>10}{'forwarded again':>17}")
    for row in rows:
        print(
            f"{row['distance']:>8}{row['plain_seconds'][0]:>9.2f}{row['kept_seconds'][0]:>9.2f}"
            f"{row['kept_bytes'] / 2**20:>10.1f}{row['again_tokens']:>17}"
        )
    if options.output:
        report = {"model": llm.name, **llm.describe(), "tokens": options.tokens, "rows": rows}
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n")


def _prefill(llm: LLM, chunk: int, prompt: list[int], bank: SessionBank | None) -> float:
    """Seconds to the first token; with a bank a boundary is left behind each chunk."""
    engine = Engine(llm.loaded.model, prefill_chunk=chunk)
    session = PromptSession(bank, "local", prompt, range(chunk, len(prompt), chunk)) if bank else None
    engine.add(Request(prompt, SamplingParams(temperature=0, max_tokens=1).resolved({}), session=session))
    begin = time.perf_counter()
    while engine.rows:
        engine.step()
    return time.perf_counter() - begin


def _row(chunk: int, times: dict[tuple[int, bool], list[float]], sizes: dict[int, int]) -> dict[str, Any]:
    def spread(kept: bool) -> list[float]:
        seconds = times[chunk, kept]
        return [round(figure, 3) for figure in (statistics.median(seconds), min(seconds), max(seconds))]

    return {
        "distance": chunk,
        "plain_seconds": spread(False),
        "kept_seconds": spread(True),
        "kept_bytes": sizes[chunk],
        "again_tokens": chunk // 2,  # of a place that lies anywhere
    }


if __name__ == "__main__":
    main()
