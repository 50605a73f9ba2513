"""Which rejection rule keeps more: token-wise or block verification, on held-out prompts of the reference model.

Both rules are exact, so the expected number of accepted drafts decides. It is compared in pairs: at every cycle of a
sampled run both rules judge the same drafts, under many uniform numbers. Standard errors are over prompts.

    usage: rejection_rules.py [--prompts N] [--tokens N] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from selfdraft import load

PROMPTS = Path(__file__).parent.parent / "tests" / "fixtures" / "prompts.jsonl"
SETTINGS: dict[str, dict[str, Any]] = {
    "T 0.6, top_p 0.95, top_k 20": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "T 1": {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
}
DEPTHS = (2, 3, 5)
ROWS = 12  # prompts of a batch
DRAWS = 16  # uniform numbers under which a cycle is judged


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=36, help="prompts (default 36, spread over all kinds)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens a prompt (default 48)")
    parser.add_argument("--output", help="write the report as JSON to this file")
    options = parser.parse_args()
    llm = load("reference")
    records = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    prompts = [_ids(llm, record) for record in records[:: max(len(records) // options.prompts, 1)][: options.prompts]]
    report = []
    for label, sampling in SETTINGS.items():
        for depth in DEPTHS:
            line = {"sampling": label, "depth": depth, **_compare(llm, prompts, depth, options.tokens, sampling)}
            report.append(line)
            print(
                f"{label:<30} depth {depth}: token-wise {line['tokenwise']:.3f}, block {line['block']:.3f} tokens a "
                f"cycle, gain {line['gain']:+.2%} ± {line['gain_error']:.2%} over {line['cycles']} cycles",
                flush=True,
            )
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _compare(llm: Any, prompts: list[list[int]], depth: int, tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
    """Expected tokens a cycle under each rule, and the gain of block verification."""
    import mlx.core as mx

    from selfdraft import SamplingParams
    from selfdraft.engine import RULES, Engine, Request
    from selfdraft.engine.accept import rejection
    from selfdraft.engine.batch import Batch
    from selfdraft.engine.cycle import Cycle, Drafts

    emitted: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))  # by row

    class Judged(Cycle):
        def _decide(self, batch: Batch, drafts: Drafts, z: mx.array) -> tuple[mx.array, mx.array]:
            if drafts.z is None:  # only rows with one token to go
                return super()._decide(batch, drafts, z)
            assert batch.noise is not None
            p, q = mx.softmax(z, axis=-1), mx.softmax(drafts.z, axis=-1)
            depths, noise = mx.array(batch.depths), batch.noise[:, -1]
            kept = {name: mx.zeros(len(batch.rows)) for name in RULES}
            for _ in range(DRAWS):
                uniforms = mx.random.uniform(shape=(len(batch.rows), batch.depth))
                for name, rule in RULES.items():
                    kept[name] = kept[name] + rejection(rule, p, q, drafts.tokens, depths, uniforms, noise)[0]
            mx.eval(kept)
            for index, row in enumerate(batch.rows):
                if batch.depths[index] == depth:  # not the short last cycles
                    for name in RULES:
                        emitted[id(row)][name].append(1 + kept[name][index].item() / DRAWS)
            return super()._decide(batch, drafts, z)

    model = llm.loaded.model
    rows = []  # kept alive: they are told apart by identity
    for start in range(0, len(prompts), ROWS):
        engine = Engine(model, cycle=Judged(model, RULES["block"]))
        params = SamplingParams(depth=depth, max_tokens=tokens, ignore_eos=True, **sampling).resolved({})
        rows += [engine.add(Request(prompt, params)) for prompt in prompts[start : start + ROWS]]
        while engine.rows:
            engine.step()
    means = [{name: statistics.mean(values) for name, values in by_rule.items()} for by_rule in emitted.values()]
    gains = [mean["block"] / mean["tokenwise"] - 1 for mean in means]
    return {
        "tokenwise": round(statistics.mean(mean["tokenwise"] for mean in means), 4),
        "block": round(statistics.mean(mean["block"] for mean in means), 4),
        "gain": round(statistics.mean(gains), 5),
        "gain_error": round(statistics.stdev(gains) / math.sqrt(len(gains)), 5),
        "cycles": sum(len(by_rule["block"]) for by_rule in emitted.values()),
    }


def _ids(llm: Any, record: dict[str, Any]) -> list[int]:
    if "messages" in record:
        text = llm.template.render(
            record["messages"], tools=record.get("tools"), enable_thinking=bool(record.get("enable_thinking"))
        )
    else:
        text = record.get("text") or record["prompt"]
    return list(llm.tokenizer.encode(text, special=True))


if __name__ == "__main__":
    main()
