"""Measures how many drafts the reference decoder accepts on the prompts of `tests/fixtures/prompts.jsonl`.

    python tests/reference/make_acceptance_fixture.py CHECKPOINT [--seeds N] [--output FILE]

CHECKPOINT is the folder of the reference model (config, weights, tokenizer, chat template).  Before anything
is measured, the decoder must reproduce `tests/fixtures/golden/`.  The `definitions` in the file say what the
figures mean.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from reference_decoder import Continuation, ReferenceModel, Sampling, generate, prefill
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
DEPTH = 4
MAX_TOKENS = 48
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.6, top_p=0.95, top_k=20)
KINDS = ("chat", "prose", "code")
GOLDEN_TOLERANCE = 2e-4  # logits reach 45, so this is about twice what float32 leaves open

DEFINITIONS = {
    "acceptance": "accepted/tried at a draft position, conditional on the earlier drafts being accepted",
    "tried": "cycles in which the draft at this position was compared with the trunk: every earlier draft of "
    "the cycle was accepted. Drafts after an accepted EOS are not tried",
    "cycles": "each drafts `depth` tokens and verifies them in one trunk forward. They run while fewer than "
    "`max_tokens` tokens are out and no EOS is. The last one has the full depth and counts in full, even "
    "where it goes past `max_tokens`",
    "tokens": "the new tokens, cut at `max_tokens`; an EOS is the last of them. The first comes from the "
    "prompt's last position and belongs to no cycle; a cycle adds its accepted drafts and one correction or "
    "bonus (none after an accepted EOS)",
    "accepted_by_cycle": "accepted drafts of each cycle in order",
    "accepted_eos": "whether the last cycle accepted an EOS as a draft, perhaps past `max_tokens`",
    "trunk_margin": "smallest difference between the trunk's two largest logits at a position that decided a "
    "token; a runtime whose rounding is coarser may differ",
    "head_margin": "the same for the head's logits at tried drafts",
    "arithmetic": "float32 on the bfloat16 weights, one thread",
}


def prompt_ids(tokenizer: PreTrainedTokenizerBase, record: dict[str, Any]) -> list[int]:
    """Token ids of a record of prompts.jsonl: chats through the template, text as it is."""
    if record["kind"] != "chat":
        return tokenizer(record["text"], add_special_tokens=False)["input_ids"]
    return tokenizer.apply_chat_template(
        record["messages"],
        tools=record.get("tools"),
        add_generation_prompt=True,
        enable_thinking=record.get("enable_thinking", False),
        tokenize=True,
        return_dict=False,
    )


def check_golden(model: ReferenceModel) -> float:
    """Largest difference to the golden values; raises if it is above the tolerance or a draft differs."""
    golden = load_file(FIXTURES / "golden" / "golden.safetensors")
    largest = 0.0
    for prompt in json.loads((FIXTURES / "golden" / "golden.json").read_text())["prompts"]:
        ids = prompt["ids"]
        hiddens = model.trunk(ids, model.new_trunk_state())
        history = model.new_attention_state()
        head_hidden = model.head(ids[1:], hiddens[:-1], history)[-1:]
        head_hiddens, drafts = [head_hidden[0]], [int(model.logits(head_hidden).argmax())]
        for _ in range(2):
            head_hidden = model.head([drafts[-1]], head_hidden, history)
            head_hiddens.append(head_hidden[0])
            drafts.append(int(model.logits(head_hidden).argmax()))
        computed = {
            "trunk_hidden": hiddens[-4:],
            "trunk_logits": model.logits(hiddens[-4:]),
            "mtp_hidden": torch.stack(head_hiddens),
            "mtp_logits": model.logits(torch.stack(head_hiddens)),
        }
        for name, value in computed.items():
            if name.endswith("logits"):
                value = value[..., ::8]  # of these every eighth is stored
            largest = max(largest, float((value - golden[f"{prompt['name']}.{name}"]).abs().max()))
        if drafts != prompt["drafts"]:
            raise ValueError(f"golden prompt {prompt['name']}: drafts {drafts}, expected {prompt['drafts']}")
    if largest > GOLDEN_TOLERANCE:
        raise ValueError(f"the decoder is {largest:.2g} away from golden (allowed {GOLDEN_TOLERANCE})")
    return largest


def totals(runs: Iterable[Continuation]) -> dict[str, Any]:
    """Sums over continuations, with the acceptance at each position."""
    runs = list(runs)
    tried = [sum(run.tried[position] for run in runs) for position in range(DEPTH)]
    accepted = [sum(run.accepted[position] for run in runs) for position in range(DEPTH)]
    return {
        "continuations": len(runs),
        "tokens": sum(len(run.tokens) for run in runs),
        "cycles": sum(len(run.accepted_by_cycle) for run in runs),
        "tried": tried,
        "accepted": accepted,
        "acceptance": [round(a / t, 4) if t else None for a, t in zip(accepted, tried, strict=True)],
    }


def totals_by_kind(runs: dict[str, list[Continuation]]) -> dict[str, Any]:
    """Totals of each kind of prompt and of all of them."""
    result = {kind: totals(runs[kind]) for kind in KINDS}
    result["overall"] = totals(run for kind in KINDS for run in runs[kind])
    return result


def measure(checkpoint: Path, seeds: int) -> dict[str, Any]:
    """All figures of the fixture; `seeds` sampled continuations of every prompt."""
    model = ReferenceModel(checkpoint)
    print(f"largest difference to golden: {check_golden(model):.2g}", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    stop = json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"]
    records = [json.loads(line) for line in (FIXTURES / "prompts.jsonl").read_text().splitlines()]

    greedy: dict[str, list[Continuation]] = {kind: [] for kind in KINDS}
    sampled: list[dict[str, list[Continuation]]] = [{kind: [] for kind in KINDS} for _ in range(seeds)]
    prompts = []
    start = time.monotonic()
    for index, record in enumerate(records):
        kind, ids = record["kind"], prompt_ids(tokenizer, record)
        prompt = prefill(model, ids)
        run = generate(model, prompt, MAX_TOKENS, DEPTH, GREEDY, stop)
        greedy[kind].append(run)
        prompts.append(
            {
                "id": record["id"],
                "kind": kind,
                "prompt_ids": ids,
                "greedy": {
                    "tokens": run.tokens,
                    "cycles": len(run.accepted_by_cycle),
                    "tried": run.tried,
                    "accepted": run.accepted,
                    "accepted_by_cycle": run.accepted_by_cycle,
                    "accepted_eos": run.accepted_end,
                    "trunk_margin": round(run.trunk_margin, 5),
                    "head_margin": round(run.head_margin, 5) if run.tried[0] else None,
                },
            }
        )
        for seed in range(seeds):
            # Every continuation has its own stream of random numbers.
            sampled[seed][kind].append(
                generate(model, prompt, MAX_TOKENS, DEPTH, SAMPLED, stop, seed=seed * len(records) + index)
            )
        print(f"{index + 1}/{len(records)} {record['id']}: {time.monotonic() - start:.0f} s", flush=True)

    every_seed = {kind: [run for runs in sampled for run in runs[kind]] for kind in KINDS}
    return {
        "definitions": DEFINITIONS,
        "depth": DEPTH,
        "max_tokens": MAX_TOKENS,
        "stop_ids": stop,
        "greedy": {"settings": {"temperature": 0.0}, "totals": totals_by_kind(greedy)},
        "sampled": {
            "settings": {"temperature": SAMPLED.temperature, "top_p": SAMPLED.top_p, "top_k": SAMPLED.top_k},
            "filter_order": "temperature, top_k, top_p; the same for trunk and head",
            "seeds": seeds,
            "totals": totals_by_kind(every_seed),
            "totals_by_seed": [totals_by_kind(runs) for runs in sampled],
        },
        "prompts": prompts,
    }


def write(fixture: dict[str, Any], output: Path) -> None:
    """Writes the fixture with one prompt and one set of totals a line, so that differences can be read."""
    prompts = fixture["prompts"]
    head = json.dumps({key: value for key, value in fixture.items() if key != "prompts"}, indent=1)
    head = re.sub(r"\[[^\[\]{}]*\]", on_one_line, head)  # the innermost lists: numbers, one for each position
    head = re.sub(r'\{\s*"continuations"[^{}]*\}', on_one_line, head)
    lines = ",\n".join("  " + json.dumps(prompt, separators=(",", ":")) for prompt in prompts)
    head = head.removesuffix("\n}")
    output.write_text(f'{head},\n "prompts": [\n{lines}\n ]\n}}\n')


def on_one_line(match: re.Match[str]) -> str:
    """A matched piece of JSON without its line breaks."""
    return json.dumps(json.loads(match[0]))


@torch.no_grad()
def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Measures the reference decoder's acceptance.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--seeds", type=int, default=16, help="sampled continuations of each prompt")
    parser.add_argument("--output", type=Path, default=FIXTURES / "acceptance.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    fixture = measure(options.checkpoint, options.seeds)
    write(fixture, options.output)
    for mode in ("greedy", "sampled"):
        for kind, figures in fixture[mode]["totals"].items():
            print(mode, kind, json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
