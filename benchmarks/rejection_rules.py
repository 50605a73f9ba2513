"""Which rejection rule keeps more: token-wise or block verification, on held-out prompts of the reference model.

Both rules are exact, so tokens a cycle decide. Prompts run as one batch, unseeded; standard errors are over prompts.

    usage: rejection_rules.py [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from selfdraft import SamplingParams, load
from selfdraft.settings import load_settings

PROMPTS = Path(__file__).parent.parent / "tests" / "fixtures" / "prompts.jsonl"
SETTINGS = {
    "T 0.6, top_p 0.95, top_k 20": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "T 1": {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
}
DEPTHS = (2, 3, 5)
ROWS = 30  # prompts of a batch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64, help="tokens a prompt (default 64)")
    parser.add_argument("--output", help="write the report as JSON to this file")
    options = parser.parse_args()
    records = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    report = []
    models = {rule: load("reference", settings=load_settings(acceptance=rule)) for rule in ("tokenwise", "block")}
    for label, sampling in SETTINGS.items():
        for depth in DEPTHS:
            line: dict[str, Any] = {"sampling": label, "depth": depth}
            for rule, llm in models.items():
                params = SamplingParams(depth=depth, max_tokens=options.tokens, ignore_eos=True, **sampling)
                line[rule] = _measure(llm, records, params)
            line["gain"] = round(line["block"]["tokens_per_cycle"] / line["tokenwise"]["tokens_per_cycle"] - 1, 4)
            report.append(line)
            print(
                f"{label:<30} depth {depth}: token-wise {_shown(line['tokenwise'])}, block {_shown(line['block'])}, "
                f"gain {line['gain']:+.1%}",
                flush=True,
            )
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _measure(llm: Any, records: list[dict[str, Any]], params: SamplingParams) -> dict[str, float]:
    """Tokens a cycle, mean over prompts of equal weight in cycles, with its standard error."""
    prompts = [_ids(llm, record) for record in records]
    timings = [
        result.timings
        for start in range(0, len(prompts), ROWS)
        for result in llm.generate_many(prompts[start : start + ROWS], params)
    ]
    rates = [t.tokens_per_cycle for t in timings]
    cycles = sum(t.cycles for t in timings)
    return {
        "tokens_per_cycle": round(sum(t.tokens_per_cycle * t.cycles for t in timings) / cycles, 4),
        "standard_error": round(statistics.stdev(rates) / math.sqrt(len(rates)), 4),
        "cycles": cycles,
    }


def _ids(llm: Any, record: dict[str, Any]) -> list[int]:
    if "messages" in record:
        text = llm.template.render(
            record["messages"], tools=record.get("tools"), enable_thinking=bool(record.get("enable_thinking"))
        )
    else:
        text = record.get("text") or record["prompt"]
    return list(llm.tokenizer.encode(text, special=True))


def _shown(figures: dict[str, float]) -> str:
    return f"{figures['tokens_per_cycle']:.3f} ± {figures['standard_error']:.3f}"


if __name__ == "__main__":
    main()
