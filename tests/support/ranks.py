"""Several processes over the ring back end on loopback, of which rank 0 does a job and prints what it found.

usage: python -m tests.support.ranks JOB FOLDER      as one rank, in the environment of a group
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from selfdraft.distributed.environment import started_in_group
from selfdraft.distributed.launch import environments

__all__ = ["ROOT", "SHARED", "run_ranks", "shared_folder", "start_ranks"]

ROOT = Path(__file__).resolve().parents[2]

# Fields of a nano model that two and four ranks can share; four have a key/value head for two of them each.
SHARED: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 8192,
}


def shared_folder(folder: Path, *, seed: int = 0, bits: int | None = None, **config: Any) -> Path:
    """A checkpoint with random weights and a real text side, which several ranks can share."""
    from tests.support.checkpoints import add_text_side
    from tests.support.nano import nano_model, write_checkpoint

    fields = {**SHARED, **config}
    model = nano_model(seed, bits=bits, sharpness=3.0, **fields)
    return add_text_side(write_checkpoint(folder, model, config=fields))


def start_ranks(ranks: int, job: str, folders: Sequence[Path], scratch: Path) -> list[subprocess.Popen[str]]:
    """Start the ranks; each loads its folder."""
    command = [sys.executable, "-m", "tests.support.ranks", job]
    return [
        subprocess.Popen(
            [*command, str(folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **each},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each, folder in zip(environments(ranks, "ring", scratch), folders, strict=True)
    ]


def run_ranks(ranks: int, job: str, folder: Path, scratch: Path, *others: Path) -> tuple[Any, list[str], list[int]]:
    """What rank 0 found, what each said on standard error, and how each ended.

    Args:
        others: folders of the other ranks, where they differ.
    """
    processes = start_ranks(ranks, job, [folder, *(others or [folder] * (ranks - 1))], scratch)
    try:
        said = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = said[0][0].splitlines()
    return (
        (json.loads(lines[-1]) if lines else None),
        [each[1] for each in said],
        [each.returncode for each in processes],
    )


def _main(job: str, folder: str) -> int:
    from tests import conftest  # reference BLAS, nobody's settings

    assert conftest
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from selfdraft.distributed.group import Group
    from selfdraft.distributed.leading import Leader
    from selfdraft.errors import SelfdraftError
    from tests.distributed import jobs

    backend = started_in_group()
    assert backend is not None
    group = Group.join(backend)
    try:
        if group.rank:
            _follow(group, Path(folder))
            return 0
        leader = Leader(group)
        run: Callable[[Leader, str], Any] = getattr(jobs, job)
        print(json.dumps(run(leader, folder)), flush=True)
        leader.close()
    except SelfdraftError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _follow(group: Any, folder: Path) -> None:
    import mlx.core as mx

    from selfdraft.distributed.facts import facts
    from selfdraft.distributed.following import follow
    from selfdraft.distributed.parts import built_part
    from selfdraft.memory import Allowance
    from selfdraft.models.checkpoint import classify

    checkpoint = classify(folder)
    granted = Allowance.of(checkpoint.weight_bytes(mx.float32) // group.size, None)
    follow(group, facts(checkpoint, mx.float32), granted, lambda: built_part(checkpoint, mx.float32, group))


if __name__ == "__main__":
    code = _main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads of the ring wait for ranks that are no more
