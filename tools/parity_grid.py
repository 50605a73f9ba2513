"""The full parity grid: greedy MTP against greedy AR, token for token, on the reference checkpoint.

50 prompts x 128 tokens (EOS ignored) x depths 0-5 x bf16, 8-bit and 4-bit weights, on a CPU with MLX's reference BLAS.
Every prompt and depth is decoded alone, from one prefill of the prompt. Jobs go to all cores,
and finished ones are kept in a journal beside the output, so an interrupted run goes on where it was.

    usage: parity_grid.py --output FILE [--workers N] [--seconds N] [--prompts N] [--tokens N]
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FORMATS = {"bf16": None, "8-bit": 8, "4-bit": 4}
DEPTHS = range(6)
GROUP = 64


def main() -> None:
    options = _options()
    output = Path(options.output)
    journal = output.with_suffix(".journal.jsonl")
    jobs = [(format, index) for format in FORMATS for index in range(options.prompts)]
    done = _journal(journal)
    begin = time.monotonic()
    todo = [job for job in jobs if job not in done]
    print(f"{len(jobs)} jobs, {len(done)} already done, {options.workers} workers", flush=True)
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: set[Future[dict[str, Any]]] = set()
        while todo or running:
            out_of_time = options.seconds and time.monotonic() - begin > options.seconds
            while todo and len(running) < options.workers and not out_of_time:
                running.add(pool.submit(compare, *todo.pop(0), options.tokens))
            if not running:
                break
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                result = future.result()
                done[result["format"], result["prompt"]] = result
                with journal.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                print(
                    f"{len(done)}/{len(jobs)} {result['format']} prompt {result['prompt']}: "
                    f"{'equal' if all(result['equal']) else 'DIFFERENT'} ({result['seconds']:.0f} s)",
                    flush=True,
                )
    summary = _summary(done, options)
    output.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))
    if len(done) == len(jobs):
        journal.unlink()


def compare(format: str, index: int, tokens: int) -> dict[str, Any]:
    """Decode one prompt at every depth; equal[d] says whether depth d gives what depth 0 gives."""
    sys.path.insert(0, str(ROOT))
    from tests.support.rows import finish, fork_rows, params

    engine, prompts = _engine(FORMATS[format])
    begin = time.perf_counter()
    asked = [params(depth=depth, temperature=0, max_tokens=tokens, ignore_eos=True) for depth in DEPTHS]
    rows = fork_rows(engine, prompts[index], None, asked)
    engine._running.clear()
    for row in rows:  # one after the other
        engine._running.append(row)
        finish(engine)
    texts = [row.emitted for row in rows]
    cycles = [row.statistics.cycles for row in rows]
    return {
        "format": format,
        "prompt": index,
        "equal": [text == texts[0] and len(text) == tokens for text in texts],
        "cycles": cycles,
        "seconds": time.perf_counter() - begin,
    }


@functools.cache
def _engine(bits: int | None) -> tuple[Any, list[list[int]]]:
    """One engine a process and format; MLX comes in after the BLAS is chosen."""
    os.environ["SELFDRAFT_BLAS"] = "reference"
    from selfdraft.device import choose_blas, choose_dtype

    choose_blas("reference")
    import mlx.core as mx
    import mlx.nn as nn

    from selfdraft.engine import Engine
    from selfdraft.models.checkpoint import classify
    from selfdraft.models.loader import build_model
    from selfdraft.source import find_model

    mx.set_default_device(mx.cpu)
    # Quantised weights run with fp32 activations on a CPU (see selfdraft.device.choose_dtype).
    dtype = choose_dtype("auto", quantised=bits is not None)
    model = build_model(classify(find_model("reference")), with_head=True, dtype=dtype).model
    if bits:
        assert isinstance(model, nn.Module)
        nn.quantize(model, group_size=GROUP, bits=bits)
    records = json.loads((ROOT / "tests" / "fixtures" / "acceptance.json").read_text(encoding="utf-8"))["prompts"]
    # 20 chat, 15 prose, 15 code: the last two have the lowest acceptance, so the most rejections to get right.
    kinds = {"chat": 20, "prose": 15, "code": 15}
    chosen = [record for kind, count in kinds.items() for record in [r for r in records if r["kind"] == kind][:count]]
    return Engine(model), [record["prompt_ids"] for record in chosen]


def _journal(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    if not path.exists():
        return {}
    results = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(result["format"], result["prompt"]): result for result in results}


def _summary(done: dict[tuple[str, int], dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    import mlx.core as mx

    grid: dict[str, Any] = {}
    for format in FORMATS:
        results = [result for (name, _), result in sorted(done.items()) if name == format]
        grid[format] = {
            "prompts": len(results),
            "tokens_compared_per_depth": len(results) * options.tokens,
            "prompts_equal_by_depth": [sum(result["equal"][depth] for result in results) for depth in DEPTHS],
            "trunk_cycles_by_depth": [sum(result["cycles"][depth] for result in results) for depth in DEPTHS],
        }
    return {
        "what": "greedy MTP against greedy AR, reference checkpoint, CPU, reference BLAS",
        "mlx": mx.__version__,
        "tokens": options.tokens,
        "grid": grid,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", required=True, help="summary as JSON")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--seconds", type=float, default=0, help="start no further job after this many seconds")
    parser.add_argument("--prompts", type=int, default=50, help="prompts of each format (default 50)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens decoded a prompt (default 128)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
