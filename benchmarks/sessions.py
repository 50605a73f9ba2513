"""The second turn of a conversation on this machine: cold, warm in memory, warm on disk after a restart; and that of
mlx_lm.server with its prompt cache.

At each length of history, several conversations that share nothing. Their turns take turns between the two servers: the
first turn forwards the history (cold), the next adds an answer and a question to it (warm). Told are times to the first
token, how many tokens were forwarded, the bytes a turn left on disk, and the time from the start of a process to the
first token of the next turn.

    usage: sessions.py [--model NAME] [--lengths N ...] [--rounds N] [--quick] [--output FILE]
"""

from __future__ import annotations

import argparse
import http.client
import importlib.metadata
import json
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from http_stream import Stream, ask, in_dtype, ours, stock

from selfdraft import load
from selfdraft.settings import load_settings

SCHEMA_VERSION = 1
ANSWER = 16  # tokens
QUESTION = "Tell me in one short sentence what that was about, please."
FILLER = (
    "The keeper wrote down the weather of the day, the ships that had passed, and what the light had burned. "
    "In the evening the wind turned to the west, and a boat came in with letters, flour and a basket of apples. "
)
RESERVE = 512  # tokens of the context that a history leaves to what comes after it

Messages = list[dict[str, str]]


def main() -> None:
    options = _options()
    llm = load(options.model, settings=load_settings(session_cache_max_bytes=0))
    description = llm.describe()
    lengths = [min(length, llm.context_length - RESERVE) for length in options.lengths]
    print(
        f"{llm.name}: {description['dtype']} on {description['device']}, BLAS {description['blas']}, "
        f"{platform.machine()} with {os.cpu_count()} processors, mlx {importlib.metadata.version('mlx')}, "
        f"mlx-lm {importlib.metadata.version('mlx-lm')}; {options.rounds} conversations a length\n"
    )
    with (
        tempfile.TemporaryDirectory() as cache,
        in_dtype(llm.checkpoint.folder, description["dtype"]) as folder,
    ):
        flags = ("--ssd-session-cache-dir", cache, "--ssd-session-cache", "on")
        ours_at = partial(ours, options.model, *flags)
        stock_at = partial(stock, folder, description["blas"], prompt_cache=10)
        _print_head()
        rows = []
        for length in lengths:
            rows.append(_measure(llm, ours_at, stock_at, length, options.rounds))
            _print(rows[-1])
    if options.output:
        report = {
            "schema_version": SCHEMA_VERSION,
            "model": llm.name,
            "machine": platform.machine(),
            "processors": os.cpu_count(),
            "mlx": importlib.metadata.version("mlx"),
            "mlx_lm": importlib.metadata.version("mlx-lm"),
            **description,
            "rounds": options.rounds,
            "rows": rows,
        }
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="reference", help="reference, a folder, or a Hugging Face id")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of history (default 1000 8000 32000)")
    parser.add_argument("--rounds", type=int, help="conversations at each length (default 3)")
    parser.add_argument("--quick", action="store_true", help="one short one: shows that it runs, not how fast")
    parser.add_argument("--output", help="write the report as JSON to this file")
    options = parser.parse_args()
    options.lengths = options.lengths or ([300] if options.quick else [1000, 8000, 32000])
    options.rounds = options.rounds or (1 if options.quick else 3)
    if options.rounds < 1 or min(options.lengths) < 100:
        parser.error("--rounds must be at least 1, --lengths 100")
    return options


def _history(llm: Any, length: int, number: int) -> Messages:
    """A conversation of about so many tokens that shares no more with another than the template's first words."""
    messages: Messages = [{"role": "system", "content": f"{number} is the number of this conversation."}]
    each = len(llm.tokenizer.encode(FILLER, special=True))
    turns = max(1, min(8, length // 400))
    filler = FILLER * max(1, (length // turns - 20) // (2 * each))
    for turn in range(turns):
        messages += [{"role": "user", "content": f"{turn}. {filler}"}, {"role": "assistant", "content": filler}]
    while len(llm.tokens(messages)) < length - each:
        messages[-1]["content"] += FILLER
    return [*messages, {"role": "user", "content": QUESTION}]


def _measure(
    llm: Any, ours_at: Callable[[], Any], stock_at: Callable[[], Any], length: int, rounds: int
) -> dict[str, Any]:
    histories = [_history(llm, length, number) for number in range(rounds)]
    cold: list[Stream] = []
    warm: list[Stream] = []
    disk: list[Stream] = []
    stock_cold: list[Stream] = []
    stock_warm: list[Stream] = []
    written, restarts = [], []
    with ours_at() as port, stock_at() as stock_port:
        for each in (port, stock_port):  # warm-up: kernels, page faults
            ask(each, "Hello", max_tokens=4)
        for number, history in enumerate(histories):
            turns = [
                partial(_two_turns, port, history, cold, warm, written),
                partial(_two_turns, stock_port, history, stock_cold, stock_warm),
            ]
            for turn in turns if number % 2 == 0 else turns[::-1]:
                turn()
    for history, before in zip(histories, warm, strict=True):
        begin = time.perf_counter()
        with ours_at() as port:
            up = time.perf_counter()
            third = [*_answered(_answered(history, cold[len(restarts)].text), before.text)]
            disk.append(ask(port, third, max_tokens=ANSWER))
            restarts.append(up - begin + disk[-1].first)
    return {
        "history_tokens": round(statistics.median(stream.prompt_tokens for stream in cold)),
        "cold": _figures(cold),
        "warm": _figures(warm),
        "warm_from_disk": _figures(disk),
        "restart_to_first_token_ms": _spread([seconds * 1e3 for seconds in restarts]),
        "bytes_written_a_turn": _spread(written),
        "mlx_lm_cold": _figures(stock_cold),
        "mlx_lm_warm": _figures(stock_warm),
    }


def _answered(messages: Messages, answer: str) -> Messages:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": QUESTION}]


def _two_turns(
    port: int, history: Messages, cold: list[Stream], warm: list[Stream], written: list[float] | None = None
) -> None:
    before = _written(port) if written is not None else 0.0
    cold.append(ask(port, history, max_tokens=ANSWER))
    warm.append(ask(port, _answered(history, cold[-1].text), max_tokens=ANSWER))
    if written is not None:
        written.append((_written(port, settled=True) - before) / 2)


def _written(port: int, *, settled: bool = False) -> float:
    """Bytes the server has written to disk; if asked, once it has written all it is to."""
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        figures = dict(re.findall(r"^selfdraft_session_disk_(\w+) (\S+)$", text, re.MULTILINE))
        if "written_bytes_total" in figures and not (settled and float(figures["pending_bytes"])):
            return float(figures["written_bytes_total"])
        time.sleep(0.1)


def _figures(streams: Sequence[Stream]) -> dict[str, Any]:
    return {
        "first_token_ms": _spread([stream.first * 1e3 for stream in streams]),
        "forwarded_tokens": round(statistics.median(s.prompt_tokens - s.cached_tokens for s in streams)),
    }


def _spread(values: Sequence[float]) -> list[float]:
    """Median, least, most."""
    return [round(statistics.median(values), 1), round(min(values), 1), round(max(values), 1)]


NAMES = {
    "cold": "cold",
    "warm": "warm in memory",
    "warm_from_disk": "warm on disk",
    "mlx_lm_cold": "mlx_lm.server cold",
    "mlx_lm_warm": "mlx_lm.server warm",
}


def _print_head() -> None:
    print(f"{'history':>8}  {'':<20}{'first token ms':>15}  {'spread':<18}{'forwarded':>10}", flush=True)


def _print(row: dict[str, Any]) -> None:
    for key, name in NAMES.items():
        median, low, high = row[key]["first_token_ms"]
        forwarded = row[key]["forwarded_tokens"]
        print(f"{row['history_tokens']:>8}  {name:<20}{median:>15.0f}  {f'{low:.0f}-{high:.0f}':<18}{forwarded:>10}")
    print(
        f"{'':>10}restart to first token {row['restart_to_first_token_ms'][0]:.0f} ms; "
        f"{row['bytes_written_a_turn'][0] / 2**20:.1f} MiB written a turn",
        flush=True,
    )


if __name__ == "__main__":
    main()
