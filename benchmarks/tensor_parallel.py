"""One model on one rank and on several: the same tokens, tokens/s, and what passes between the ranks.

Measures alone first, then starts itself through `mlx.launch`, and writes both into one JSON after every part. Ranks on
one CPU share its cores: speeds of the ring on one machine say nothing of several machines.

    usage: tensor_parallel.py [--ranks 2] [--backend ring] [--shape 27b] [--tokens 128] [--limit 170] --output FILE
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfdraft.device import choose_blas
from selfdraft.distributed.environment import started_in_group
from selfdraft.files import write_atomically

BEGIN = time.monotonic()
SHARE = 0.45  # of the time, for the part that runs alone
NOBODY = 3  # exit code: the ranks do not meet


def say(text: str) -> None:
    """Progress, with the rank."""
    print(f"[{time.monotonic() - BEGIN:6.1f} s, rank {os.environ.get('MLX_RANK', '-')}] {text}", flush=True)


@dataclass(frozen=True)
class Setting:
    """One way to decode."""

    name: str
    depth: int
    looks_ahead: bool = False
    sampling: tuple[tuple[str, float], ...] = (("temperature", 0.0),)


SEEDED = (("temperature", 0.6), ("top_p", 0.95), ("top_k", 20), ("seed", 7))
SETTINGS = (
    Setting("AR", 0),
    Setting("depth 3", 3),
    Setting("depth 3, seeded", 3, sampling=SEEDED),
    Setting("AR, looking ahead", 0, looks_ahead=True),
    Setting("depth 3, looking ahead", 3, looks_ahead=True),
)


def main() -> int:
    """Both halves, or one as a worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="ring", choices=["ring", "nccl", "jaccl", "mpi"])
    parser.add_argument("--shape", default="27b", help="of a synthetic model; none for the reference model alone")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--limit", type=float, default=170.0, help="seconds for everything")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    return worker(args) if args.worker else compare(args)


def compare(args: argparse.Namespace) -> int:
    """Run both parts, each in processes of its own, and put what they found together."""
    found: dict[str, Any] = {"ranks": args.ranks, "backend": args.backend, "command": sys.argv[1:]}
    with tempfile.TemporaryDirectory() as folder:
        for part, limit in (("alone", SHARE * args.limit), ("group", args.limit)):
            target = Path(folder) / f"{part}.json"
            command = [sys.executable, __file__, "--worker", "--output", str(target)]
            command += ["--shape", args.shape, "--tokens", str(args.tokens)]
            if part == "group":
                launch = shutil.which("mlx.launch", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
                command = [str(launch), "-n", str(args.ranks), "--backend", args.backend, "--", *command]
            said = run(command, limit - (time.monotonic() - BEGIN))
            found[part] = json.loads(target.read_text()) if target.exists() else {}
            found[part]["ended"] = said
            found["parity"] = parity(found)
            write_atomically(args.output, json.dumps(found, indent=1))
            say(f"{part}: {said}; written to {args.output}")
    for line in table(found):
        print(line)
    return 0 if found["group"].get("models") else 1


def run(command: list[str], limit: float) -> str:
    """Run a part in a session of its own; how it ended."""
    say(f"{' '.join(command)} (at most {limit:.0f} s)")
    found = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(found)}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.PIPE)
    try:
        code = process.wait(max(limit, 1))
        return "done" if code == 0 else f"exit code {code}; its output says why"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"stopped after {limit:.0f} s; what is there was measured before"


def parity(found: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Of each model and setting: whether several ranks emit what one does, or up to where."""
    result: dict[str, dict[str, str]] = {}
    alone, group = (found.get(part, {}).get("models", {}) for part in ("alone", "group"))
    for model in alone.keys() & group.keys():
        result[model] = {}
        for name in alone[model]["settings"].keys() & group[model]["settings"].keys():
            one, many = (each[model]["settings"][name]["ids"].split() for each in (alone, group))
            same = next((i for i, pair in enumerate(zip(one, many, strict=False)) if pair[0] != pair[1]), len(one))
            result[model][name] = "equal" if one == many else f"equal up to token {same} of {len(one)}"
    return result


def table(found: dict[str, Any]) -> Iterator[str]:
    """For people."""
    for part in ("alone", "group"):
        for model, figures in found.get(part, {}).get("models", {}).items():
            for name, each in figures["settings"].items():
                same = found["parity"].get(model, {}).get(name, "") if part == "group" else ""
                speed = f"{each['tokens_per_second']:8.1f} tok/s, {each['milliseconds_a_cycle']:7.2f} ms a cycle"
                wire = f", {each['wire']}" if each["wire"] else ""
                yield f"{part:5} {model:12} {name:24} {speed} {same}{wire}"


def worker(args: argparse.Namespace) -> int:
    """Measure alone, or as one rank of a group."""
    choose_blas("auto")
    from selfdraft.distributed.group import Group
    from selfdraft.errors import SelfdraftError

    backend = started_in_group()
    try:
        group = Group.join(backend) if backend else None
    except SelfdraftError as error:
        say(str(error))
        return NOBODY
    say(f"{group.size} ranks meet over {group.backend}" if group else "alone")
    results: dict[str, Any] = {"models": {}}
    for model in ("reference", *([args.shape] if args.shape != "none" else [])):
        measure(model, group, args, results)
    say("done")
    sys.stdout.flush()
    os._exit(0)  # threads of the back end may wait for each other


def measure(name: str, group: Any, args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Build a model and decode in every way; ranks other than 0 follow."""
    from tensor_parallel_models import Bench, built

    from selfdraft.distributed.following import follow
    from selfdraft.distributed.leading import Leader, LeadingModel
    from selfdraft.memory import Allowance

    granted = Allowance.of(0, None)
    if group is not None and group.rank:
        follow(group, {"model": name}, granted, lambda: built(name, group))
        return
    leader = Leader(group) if group else None
    if leader:
        leader.meet({"model": name}, granted)
    begin = time.monotonic()
    loaded = built(name, group)
    say(f"{name}: {loaded.nbytes / 2**30:.2f} GiB on this rank, built in {time.monotonic() - begin:.1f} s")
    model = LeadingModel(loaded.model, leader) if leader else loaded.model
    bench = Bench(model, leader)
    figures: dict[str, Any] = {"bytes": loaded.nbytes, "quantisation": loaded.quantisation, "settings": {}}
    results["models"][name] = figures
    for setting in SETTINGS:
        if leader and setting.looks_ahead:
            continue
        figures["settings"][setting.name] = bench.decode(setting, args.tokens)
        speed = figures["settings"][setting.name]["tokens_per_second"]
        say(f"{name}: {setting.name}: {speed:.1f} tokens/s")
        write_atomically(args.output, json.dumps(results))
    if leader:
        leader.close()


if __name__ == "__main__":
    sys.exit(main())
