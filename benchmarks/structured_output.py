"""Tokens a cycle with a JSON schema and without one, on the same prompts: what a grammar costs drafting.

Each prompt is decoded four times in one run: free at depth 0 and at the given depth, and so under the schema. Seconds
are wall time of the cycles, the making of masks included.

    usage: structured_output.py [--model NAME] [--depth K] [--tokens N] [--temperature T] [--prompts N] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from selfdraft import SamplingParams, load

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["place", "person", "thing", "event"]},
        "summary": {"type": "string", "maxLength": 160},
        "year": {"type": "integer", "minimum": 0, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "minItems": 2, "maxItems": 4},
    },
    "required": ["title", "kind", "summary", "year", "tags"],
    "additionalProperties": False,
}
PROMPTS = [
    "Describe the city of Paris as a JSON object with title, kind, summary, year and tags.",
    "Describe the first flight to the moon as a JSON object with title, kind, summary, year and tags.",
    "Describe Isaac Newton as a JSON object with title, kind, summary, year and tags.",
    "Describe the steam engine as a JSON object with title, kind, summary, year and tags.",
]


def main() -> None:
    asked = _arguments()
    llm = load(asked.model)
    from selfdraft.text.grammar import Grammars

    depth = min(asked.depth, llm.max_depth)
    grammar = Grammars(llm.tokenizer).json_schema(SCHEMA)
    kinds = [(name, at) for name in ("free", "schema") for at in (0, depth)]
    rows = {kind: [] for kind in kinds}  # type: dict[tuple[str, int], list[dict[str, Any]]]
    for number, prompt in enumerate(PROMPTS[: asked.prompts]):
        for name, at in kinds:
            params = SamplingParams(
                depth=at, max_tokens=asked.tokens, temperature=asked.temperature, seed=number, ignore_eos=True
            )
            rows[name, at].append(_decode(llm, prompt, params, grammar if name == "schema" else None))
    report = [{"kind": name, "depth": at, **_summary(rows[name, at])} for name, at in kinds]
    _print_table(report, asked)
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="tokens a cycle with and without a JSON schema")
    parser.add_argument("--model", default="reference")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the prompts")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser.parse_args()


def _decode(llm: Any, prompt: str, params: SamplingParams, grammar: Any) -> dict[str, Any]:
    """Figures of one answer. It is run by the engine itself: the facade takes no constraint."""
    from selfdraft.engine import Request

    request = Request(
        llm.tokens(prompt),
        params.resolved(llm.defaults),
        stop_ids=llm.tokenizer.eos_ids,
        constraint=grammar.start() if grammar else None,
    )
    waits = llm.engine.cycle.synchronisations
    row = llm.engine.add(request)
    for _ in llm.engine.run(row):
        pass
    statistics = row.statistics
    timings = statistics.timings()
    return {
        "cycles": timings.cycles,
        "tokens": len(row.emitted) - timings.emitted["prefill"],
        "seconds": statistics.decode_seconds,
        "waits": llm.engine.cycle.synchronisations - waits,
        "tried": timings.drafts_tried,
        "accepted": timings.drafts_accepted,
        "complete": row.finish_reason == "stop",
    }


def _summary(figures: list[dict[str, Any]]) -> dict[str, Any]:
    total = {name: sum(figure[name] for figure in figures) for name in ("cycles", "tokens", "seconds", "waits")}
    width = max(len(figure["tried"]) for figure in figures)
    counts = [
        [sum(sum(figure[name][i : i + 1]) for figure in figures) for i in range(width)]
        for name in ("accepted", "tried")
    ]
    return {
        "tokens": total["tokens"],
        "complete": sum(figure["complete"] for figure in figures),
        "tokens_per_cycle": round(total["tokens"] / total["cycles"], 3),
        "waits_per_cycle": round(total["waits"] / total["cycles"], 3),
        "tokens_per_second": round(total["tokens"] / total["seconds"], 1),
        "acceptance": [round(kept / tried, 3) for kept, tried in zip(*counts, strict=True) if tried],
    }


def _print_table(report: list[dict[str, Any]], asked: argparse.Namespace) -> None:
    print(f"{asked.prompts} prompts, at most {asked.tokens} tokens each, temperature {asked.temperature}, seeded")
    print(f"{'':<8}{'depth':>6}{'tokens':>8}{'complete':>10}{'tok/cycle':>11}{'waits':>7}{'tok/s':>8}  acceptance")
    for row in report:
        print(
            f"{row['kind']:<8}{row['depth']:>6}{row['tokens']:>8}{row['complete']:>10}{row['tokens_per_cycle']:>11.2f}"
            f"{row['waits_per_cycle']:>7.2f}{row['tokens_per_second']:>8.1f}  "
            + " ".join(f"{rate:.2f}" for rate in row["acceptance"])
        )


if __name__ == "__main__":
    main()
