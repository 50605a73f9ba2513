"""Speed over HTTP on this machine, against mlx_lm.server, in one alternating run.

Both servers hold the same checkpoint in the same dtype, on the same BLAS. At each number of clients they take turns,
several rounds over: every client streams greedy answers to fixed prompts, one after the other, for some seconds. Told
are the time to the first token, the time between tokens (of a stream: first to last over their number, since several
may come at once) and the tokens of all clients per second.

Then what HTTP costs: the same answers at one client and in this process through `LLM.stream`, in turn; the difference
of their times between tokens.

    usage: server.py [--model NAME] [--clients N ...] [--seconds S] [--rounds N] [--tokens N] [--quick] [--output FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from http_stream import Stream, ask, ask_at_once, in_dtype, ours, stock

from selfdraft import SamplingParams, load
from selfdraft.settings import load_settings

SCHEMA_VERSION = 1
LIMIT_MS = 1.0  # what HTTP may cost a token
FORMS = [
    "Write a short story about {}.",
    "Tell me about {}.",
    "Write a short poem about {}.",
    "Explain {} to a child.",
]
TOPICS = ["a penguin", "the sea", "a lighthouse", "bread"]
PROMPTS = [form.format(topic) for topic in TOPICS for form in FORMS]


@dataclass
class Contender:
    """A way to be served.

    Attributes:
        fields: what its requests say beside the prompt.
        rates: tokens per second of all clients, round by round; by number of clients.
    """

    name: str
    port: int
    fields: dict[str, Any]
    streams: dict[int, list[Stream]] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)

    def serve(self, clients: int, seconds: float) -> None:
        """One round."""
        streams, spent = ask_at_once(self.port, PROMPTS, clients, seconds, **self.fields)
        self.streams.setdefault(clients, []).extend(streams)
        self.rates.setdefault(clients, []).append(sum(stream.tokens for stream in streams) / spent)


def main() -> None:
    options = _options()
    llm = load(options.model, settings=load_settings(session_cache_max_bytes=0))
    description = llm.describe()
    print(
        f"{llm.name}: {description['dtype']} on {description['device']}, BLAS {description['blas']}, "
        f"{platform.machine()} with {os.cpu_count()} processors, mlx {importlib.metadata.version('mlx')}, "
        f"mlx-lm {importlib.metadata.version('mlx-lm')}; {options.tokens} tokens an answer, {options.rounds} rounds"
    )
    with (
        in_dtype(llm.checkpoint.folder, description["dtype"]) as folder,
        stock(folder, description["blas"]) as stock_port,
        ours(options.model, "--session-cache-max-bytes", "0") as port,  # nor does the other keep prompts
    ):
        length = {"max_tokens": options.tokens}
        contenders = [
            Contender("mlx_lm.server", stock_port, length),
            Contender("selfdraft depth 0", port, {**length, "depth": 0}),
        ]
        if llm.max_depth:
            contenders.append(Contender("selfdraft depth auto", port, {**length, "depth": "auto"}))
        _alternate(contenders, options.clients, options.seconds, options.rounds)
        rows = [_row(contender, contenders[0], clients) for clients in options.clients for contender in contenders]
        depths = [0, *([min(2, llm.max_depth)] if llm.max_depth else [])]
        overheads = [_overhead(llm, port, depth, options.pairs, options.tokens) for depth in depths]
    _print_tables(rows, overheads)
    if options.output:
        report = {
            "schema_version": SCHEMA_VERSION,
            "model": llm.name,
            "machine": platform.machine(),
            "processors": os.cpu_count(),
            "mlx": importlib.metadata.version("mlx"),
            "mlx_lm": importlib.metadata.version("mlx-lm"),
            **description,
            "tokens": options.tokens,
            "seconds": options.seconds,
            "rounds": options.rounds,
            "rows": rows,
            "overhead": overheads,
        }
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="reference", help="reference, a folder, or a Hugging Face id")
    parser.add_argument("--clients", type=int, nargs="+", help="clients at once (default 1 4 16)")
    parser.add_argument("--seconds", type=float, help="how long clients start new answers, a round (default 4)")
    parser.add_argument("--rounds", type=int, help="rounds of the alternating run (default 3)")
    parser.add_argument("--tokens", type=int, help="most tokens of an answer (default 48)")
    parser.add_argument("--pairs", type=int, help="answers compared for the cost of HTTP, at each depth (default 16)")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it runs, not how fast")
    parser.add_argument("--output", help="write the report as JSON to this file")
    options = parser.parse_args()
    full = {"clients": [1, 4, 16], "seconds": 4.0, "rounds": 3, "tokens": 48, "pairs": 16}
    quick = {"clients": [1, 2], "seconds": 0.5, "rounds": 1, "tokens": 8, "pairs": 2}
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if min(options.clients) < 1 or options.rounds < 1 or options.tokens < 3 or options.pairs < 1 or options.seconds < 0:
        parser.error("--clients, --rounds and --pairs must be at least 1, --tokens 3, --seconds 0")
    return options


def _alternate(contenders: Sequence[Contender], clients: Sequence[int], seconds: float, rounds: int) -> None:
    for contender in contenders:  # warm-up: models loaded, kernels compiled, page faults
        ask_at_once(contender.port, PROMPTS, max(clients), 0, **{**contender.fields, "max_tokens": 4})
    for number in range(rounds):
        for count in clients:
            for contender in contenders if number % 2 == 0 else contenders[::-1]:
                contender.serve(count, seconds)


def _row(contender: Contender, baseline: Contender, clients: int) -> dict[str, Any]:
    streams, rates = contender.streams[clients], contender.rates[clients]
    ratios = [mine / theirs for mine, theirs in zip(rates, baseline.rates[clients], strict=True)]
    return {
        "name": contender.name,
        "clients": clients,
        "streams": len(streams),
        "tokens_per_stream": round(statistics.mean(stream.tokens for stream in streams), 1),
        "first_token_ms": _figures([stream.first * 1e3 for stream in streams]),
        "inter_token_ms": _figures([stream.per_token * 1e3 for stream in streams if stream.tokens > 1]),
        "tokens_per_second": round(statistics.median(rates), 2),
        "spread": [round(min(rates), 2), round(max(rates), 2)],
        "ratio": round(statistics.median(ratios), 3),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def _figures(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 2),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 2),
    }


def _overhead(llm: Any, port: int, depth: int, pairs: int, tokens: int) -> dict[str, Any]:
    """Milliseconds a token over HTTP, in this process, and between."""
    over_http: list[float] = []
    inside: list[float] = []
    unequal = 0
    for number in range(-1, pairs):
        prompt = PROMPTS[number % len(PROMPTS)]
        runs = [
            partial(ask, port, prompt, depth=depth, max_tokens=tokens),
            partial(_in_process, llm, prompt, depth, tokens),
        ]
        order = (0, 1) if number % 2 == 0 else (1, 0)
        done = {which: runs[which]() for which in order}
        if number < 0:  # warm-up
            continue
        if done[0].text != done[1].text or done[0].tokens < 2:
            unequal += 1  # other tokens, other work
            continue
        over_http.append(done[0].per_token * 1e3)
        inside.append(done[1].per_token * 1e3)
    if not inside:
        raise SystemExit(f"depth {depth}: no answer over HTTP was the same as in this process")
    differences = [mine - theirs for mine, theirs in zip(over_http, inside, strict=True)]
    return {
        "depth": depth,
        "pairs": len(inside),
        "unequal": unequal,
        "http_ms": round(statistics.median(over_http), 3),
        "in_process_ms": round(statistics.median(inside), 3),
        "difference_ms": round(statistics.median(differences), 3),
        "difference_quartiles": [round(value, 3) for value in _quartiles(differences)],
        "difference_spread": [round(min(differences), 3), round(max(differences), 3)],
    }


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _in_process(llm: Any, prompt: str, depth: int, tokens: int) -> Stream:
    begin = time.perf_counter()
    first = None
    for piece in llm.stream(prompt, SamplingParams(depth=depth, temperature=0, max_tokens=tokens)):
        if first is None and piece.text:
            first = time.perf_counter() - begin
    last, usage = time.perf_counter() - begin, piece.result.usage
    return Stream(piece.result.text, first or last, last, usage.completion_tokens, usage.prompt_tokens)


def _print_tables(rows: Sequence[dict[str, Any]], overheads: Sequence[dict[str, Any]]) -> None:
    print(
        f"\n{'clients':<9}{'':<22}{'first token ms':>16}{'p95':>8}{'between ms':>12}{'p95':>8}"
        f"{'tok/s':>9}  {'spread':<15}{'ratio':>6}  {'spread':<11}{'streams':>8}"
    )
    for row in rows:
        first, between = row["first_token_ms"], row["inter_token_ms"]
        rates, ratios = "{:.1f}-{:.1f}".format(*row["spread"]), "{:.2f}-{:.2f}".format(*row["ratio_spread"])
        print(
            f"{row['clients']:<9}{row['name']:<22}{first['median']:>16.0f}{first['p95']:>8.0f}"
            f"{between['median']:>12.1f}{between['p95']:>8.1f}{row['tokens_per_second']:>9.1f}  {rates:<15}"
            f"{row['ratio']:>6.2f}  {ratios:<11}{row['streams']:>8}"
        )
    print("tok/s: of all clients; ratio: of tok/s against mlx_lm.server at as many clients, round by round\n")
    for row in overheads:
        quartiles = "{:+.3f} to {:+.3f}".format(*row["difference_quartiles"])
        spread = "{:+.3f} to {:+.3f}".format(*row["difference_spread"])
        verdict = "under" if row["difference_ms"] < LIMIT_MS else "NOT UNDER"
        print(
            f"HTTP, one client, depth {row['depth']}: {row['difference_ms']:+.3f} ms a token, {verdict} {LIMIT_MS:g}; "
            f"half of {row['pairs']} pairs {quartiles}, all {spread}; "
            f"{row['http_ms']:.2f} over HTTP, {row['in_process_ms']:.2f} in process"
        )


if __name__ == "__main__":
    main()
