"""Decoding speed on this machine, against stock mlx-lm, in one alternating run.

Every contender decodes the same prompts greedily, in turn, several rounds over; the table shows the median of the
rounds and their spread. Speed-up is against stock mlx-lm in our dtype, round by round. Also measured: verify cost
v(M) of M rows and head cost c, both relative to one row, and from these what the formula predicts against plain
decoding: (1 + a_1 + a_1 a_2 + ...) / (K c + v(K+1)).

    usage: decode.py [--model NAME] [--rounds N] [--tokens N] [--prompts FILE [--kind KIND]] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from selfdraft import SamplingParams, load

PROMPTS = [
    "Write a short story about a penguin.",
    "Write a Python function that counts the words in a string.",
    "Write a short email to Priya about the meeting on Friday. My name is Sam.",
    "Tell me about the climate and the economy of Ecuador.",
]
DEPTHS = (1, 2, 3, 4, 5)
WIDTHS = (1, 2, 3, 4, 5, 6)


@dataclass
class Contender:
    """Something that decodes a prompt: (tokens, seconds) of the decode phase alone, prefill left out."""

    name: str
    decode: Callable[[list[int]], tuple[int, float]]
    rates: list[float] = field(default_factory=list)


def main() -> None:
    options = _options()
    llm = load(options.model)
    import mlx.core as mx

    prompts = [llm.tokens(prompt) for prompt in options.texts]
    engine, description = llm.engine, llm.describe()
    print(
        f"{llm.name}: {description['dtype']} on {description['device']}, BLAS {description['blas']}, "
        f"mlx {mx.__version__}, {platform.machine()}; {options.tokens} tokens a prompt, {options.rounds} rounds"
    )

    figures: dict[int, dict[str, Any]] = {
        depth: {"tried": [], "accepted": [], "cycles": 0, "tokens": 0, "waits": 0} for depth in (0, *DEPTHS)
    }

    def ours(depth: int) -> Callable[[list[int]], tuple[int, float]]:
        def decode(prompt: list[int]) -> tuple[int, float]:
            params = SamplingParams(
                depth=depth, temperature=0, max_tokens=options.tokens, ignore_eos=True, repetition_penalty=1.0
            )
            waits = engine.cycle.synchronisations
            timings = llm.generate(prompt, params).timings
            _add(figures[depth], timings, engine.cycle.synchronisations - waits)
            return options.tokens - 1, timings.decode_ms / 1e3

        return decode

    stock = _stock_models(llm, description["dtype"])
    contenders = [Contender(f"mlx-lm AR {name}", _mlx_lm(model, options.tokens)) for name, model in stock.items()]
    contenders += [Contender(f"depth {depth}", ours(depth)) for depth in (0, *DEPTHS) if depth <= llm.max_depth]
    _alternate(contenders, prompts, options.rounds)

    costs = _costs(llm, options.rounds)
    rows = [_row(contender, contenders[0], figures, costs) for contender in contenders]
    _print_table(rows, costs)
    if options.output:
        report = {
            "model": llm.name,
            "machine": platform.machine(),
            "mlx": mx.__version__,
            **description,
            "prompts": len(prompts),
            "kind": options.kind,
            "tokens": options.tokens,
            "rounds": options.rounds,
            "rows": rows,
            "costs": costs,
        }
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="reference", help="reference, a folder, or a Hugging Face id")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the alternating run (default 5)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens decoded a prompt (default 96)")
    parser.add_argument("--prompts", type=Path, help="a file of JSON lines with `messages`, instead of four prompts")
    parser.add_argument("--kind", help="of the lines in that file, those whose `kind` is this")
    parser.add_argument("--output", help="write the report as JSON to this file")
    options = parser.parse_args()
    if options.rounds < 1 or options.tokens < 2:
        parser.error("--rounds must be at least 1 and --tokens at least 2")
    options.texts = PROMPTS
    if options.prompts:
        try:
            lines = [json.loads(line) for line in options.prompts.read_text().splitlines()]
        except (OSError, ValueError) as error:
            parser.error(f"--prompts {options.prompts}: {error}")
        options.texts = [each["messages"] for each in lines if options.kind in (None, each.get("kind"))]
        if not options.texts:
            parser.error(f"--prompts {options.prompts} has no line of kind {options.kind!r}")
    return options


def _stock_models(llm: Any, dtype: str) -> dict[str, Any]:
    """mlx-lm's own model in our dtype, and as it loads by itself where that differs."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model

    folder = llm.checkpoint.folder
    as_loaded, _ = load_model(folder)
    models = {}
    if not llm.checkpoint.quantised:
        cast, _ = load_model(folder)
        wanted = getattr(mx, dtype)
        cast.update(
            tree_map(lambda x: x.astype(wanted) if mx.issubdtype(x.dtype, mx.floating) else x, cast.parameters())
        )
        mx.eval(cast.parameters())
        models[dtype] = cast
    own = str(llm.checkpoint.tensors["model.norm.weight"].dtype).removeprefix("mlx.core.")
    if own != dtype or not models:
        models[f"{own}, as it loads" if models else own] = as_loaded
    return models


def _mlx_lm(model: Any, tokens: int) -> Callable[[list[int]], tuple[int, float]]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    def decode(prompt: list[int]) -> tuple[int, float]:
        steps: Iterator[Any] = generate_step(mx.array(prompt), model, max_tokens=tokens)
        next(steps)
        begin = time.perf_counter()
        count = sum(1 for _ in steps)
        return count, time.perf_counter() - begin

    return decode


def _alternate(contenders: list[Contender], prompts: list[list[int]], rounds: int) -> None:
    for contender in contenders:  # warm-up: compiled kernels, page faults
        contender.decode(prompts[0])
    for number in range(rounds):
        order = contenders if number % 2 == 0 else contenders[::-1]
        # All decode one prompt before the next: a machine that slows down for a while slows all of them.
        spent: dict[str, list[tuple[int, float]]] = {contender.name: [] for contender in contenders}
        for prompt in prompts:
            for contender in order:
                spent[contender.name].append(contender.decode(prompt))
        for contender in contenders:
            pairs = spent[contender.name]
            contender.rates.append(sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs))


def _add(figure: dict[str, Any], timings: Any, waits: int) -> None:
    for name, counts in (("tried", timings.drafts_tried), ("accepted", timings.drafts_accepted)):
        old = figure[name] + [0] * (len(counts) - len(figure[name]))
        figure[name] = [a + b for a, b in zip(old, counts + [0] * (len(old) - len(counts)), strict=True)]
    figure["cycles"] += timings.cycles
    figure["tokens"] += round(timings.tokens_per_cycle * timings.cycles)
    figure["waits"] += waits


def _costs(llm: Any, rounds: int) -> dict[str, Any]:
    """Milliseconds of one verify pass by width, behind 64 cached tokens, and of one head step."""
    import mlx.core as mx

    model, ids = llm.loaded.model, llm.tokens(PROMPTS[0])
    prefix = mx.array([(ids * 4)[:64]])
    base = model.new_state()
    hidden, captured = model.forward(prefix, [base], keep_steps=False)
    captured.commit([base], [64])
    mx.eval(base.arrays(), hidden)

    def verify(width: int) -> None:
        out, _ = model.forward(prefix[:, :width], [base.fork()], keep_steps=True)
        mx.eval(model.logits(out))

    def head() -> None:
        mx.eval(model.draft_logits(model.draft(prefix[:, :1], hidden[:, :1], [base.fork()], [0])))

    jobs: dict[str, Callable[[], None]] = {f"verify {width}": partial(verify, width) for width in WIDTHS}
    if llm.max_depth:
        jobs["head"] = head
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(4 * rounds):
        for name, job in jobs.items():
            begin = time.perf_counter()
            job()
            times[name].append((time.perf_counter() - begin) * 1e3)
    ms = {name: statistics.median(values[1:]) for name, values in times.items()}
    one = ms["verify 1"]
    return {
        "verify_ms": {str(w): round(ms[f"verify {w}"], 2) for w in WIDTHS},
        "v": {str(w): round(ms[f"verify {w}"] / one, 3) for w in WIDTHS},
        "head_ms": round(ms.get("head", 0.0), 2),
        "c": round(ms.get("head", 0.0) / one, 3),
    }


def _row(
    contender: Contender, baseline: Contender, figures: dict[int, dict[str, Any]], costs: dict[str, Any]
) -> dict[str, Any]:
    ratios = [mine / theirs for mine, theirs in zip(contender.rates, baseline.rates, strict=True)]
    row: dict[str, Any] = {
        "name": contender.name,
        "tokens_per_second": round(statistics.median(contender.rates), 2),
        "spread": [round(min(contender.rates), 2), round(max(contender.rates), 2)],
        "ratio": round(statistics.median(ratios), 3),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
    }
    if contender.name.startswith("depth"):
        depth = int(contender.name.split()[1])
        figure = figures[depth]
        acceptance = [a / t for a, t in zip(figure["accepted"], figure["tried"], strict=True) if t]
        row["tokens_per_cycle"] = round(figure["tokens"] / figure["cycles"], 3)
        row["acceptance"] = [round(rate, 3) for rate in acceptance]
        row["waits_per_cycle"] = round(figure["waits"] / figure["cycles"], 3)
        row["predicted"] = round(row["tokens_per_cycle"] / (depth * costs["c"] + costs["v"][str(depth + 1)]), 3)
    return row


def _print_table(rows: list[dict[str, Any]], costs: dict[str, Any]) -> None:
    print(
        f"\n{'':<30}{'tok/s':>8}  {'spread':<15}{'ratio':>6}  {'spread':<14}"
        f"{'tok/cycle':>9}{'waits':>7}{'predicted':>10}  acceptance"
    )
    for row in rows:
        spread = "{:.1f}-{:.1f}".format(*row["spread"])
        ratios = "{:.2f}-{:.2f}".format(*row["ratio_spread"])
        line = f"{row['name']:<30}{row['tokens_per_second']:>8.1f}  {spread:<15}{row['ratio']:>6.2f}  {ratios:<14}"
        if "tokens_per_cycle" in row:
            line += f"{row['tokens_per_cycle']:>9.2f}{row['waits_per_cycle']:>7.2f}{row['predicted']:>10.2f}  "
            line += " ".join(f"{rate:.2f}" for rate in row["acceptance"])
        print(line)
    print("\nv(M), cost of M verify rows relative to one: " + "  ".join(f"{w}: {v:.2f}" for w, v in costs["v"].items()))
    print(f"one row {costs['verify_ms']['1']:.1f} ms; head step {costs['head_ms']:.1f} ms, c = {costs['c']:.2f}")
    print("ratio: against the first line, round by round; predicted: by the formula, from v, c and tokens a cycle")


if __name__ == "__main__":
    main()
