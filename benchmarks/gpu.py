"""Every bar of speed and parity on a GPU, measured in one process on a synthetic model, as one table and one JSON.

Knows the bars, the order of the parts and the file; what is measured stands in `gpu_parts.py` and `gpu_profile.py`.
What is known is written after every part, and a part for which too little of the budget is left is named, not begun.

    usage: gpu.py [--shape 27b] [--quick] [--parts NAME ...] [--budget SECONDS] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gpu_environment  # first: before MLX
import gpu_parts
import gpu_profile
import mlx.core as mx
from gpu_turns import ACCEPTANCE, BEGIN, DEPTH, QUICK, SAMPLING, Bench, Extent, Found, NotMeasured

import selfdraft
from selfdraft.errors import SelfdraftError
from selfdraft.files import write_atomically
from selfdraft.kernels.portable import sources_digest
from selfdraft.tuning.kernel_bench import available
from selfdraft.tuning.synthetic import SHAPES

FULL_SIZE = "27b"  # the shape that the bars are about
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Bar:
    """What is asked for: `value` at least, or else at most, `limit`."""

    what: str
    unit: str
    limit: float
    at_least: bool = False

    def judged(self, value: float | None, counts: bool) -> dict[str, Any]:
        met = None
        if value is not None and counts:
            met = value >= self.limit if self.at_least else value <= self.limit
        return {
            "what": self.what,
            "value": None if value is None else float(f"{value:.4g}"),
            "bar": self.limit,
            "sense": "at least" if self.at_least else "at most",
            "met": met,
            "unit": self.unit,
        }


BARS = {
    "qmv share": Bar("4-bit 5120x17408, one row, by GPU time", "of the copy's bandwidth", 0.75, True),
    "qmv share wall": Bar("the same, 24 in one evaluation, waited for", "of the copy's bandwidth", 0.75, True),
    "qmv rows": Bar("4-bit 5120x17408, four rows over one, by GPU time", "times", 1.15),
    "qmv rows wall": Bar("the same, 24 in one evaluation, waited for", "times", 1.15),
    "step": Bar("AR step, sampled", "ms", 11.0),
    "step greedy": Bar("AR step, greedy", "ms", 11.0),
    "verify": Bar("verify forward of four tokens over AR forward, queued", "times", 1.25),
    "verify GPU": Bar("the same, by GPU time", "times", 1.25),
    "over own": Bar("depth 3 over own AR, tokens/s", "times", 2.5, True),
    "over mlx-lm": Bar("depth 3 over mlx-lm AR, tokens/s", "times", 6.0, True),
    "commit": Bar("a forward behind a rejection, more than behind full acceptance, by GPU time", "of a cycle", 0.01),
    "waits": Bar("host synchronisations", "a cycle", 1.0),
    "idle": Bar("device idle at depth 3, its kernels' time over a cycle", "of the time", 0.03),
    "idle plain": Bar("device idle at depth 0, its kernels' time over a cycle", "of the time", 0.03),
    "rows": Bar("eight rows over one, depth 3, tokens/s", "times", 4.0, True),
    "long plain": Bar("64k context over 1k, depth 0, tokens/s", "times", 0.7, True),
    "long": Bar("64k context over 1k, depth 3, tokens/s", "times", 0.7, True),
    "prefill": Bar("prefill of 8k tokens", "of the nominal bf16 peak", 0.25, True),
    "prefill measured": Bar("prefill of 8k tokens", "of a bf16 product in this run", 0.25, True),
    "parity 1": Bar("logits, one row: verify against AR", "max abs diff", 0.0),
    "parity n": Bar("logits, eight rows: verify against AR alone", "max abs diff", 0.0),
    "parity states": Bar("states behind a commit of part of a verify pass, and the logits behind them", "diff", 0.0),
}


@dataclass
class Report:
    """What is known so far, and its file. `counts`: whether the bars are about this shape and device."""

    path: Path
    head: dict[str, Any]
    counts: bool
    found: Found = field(default_factory=Found)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: bool = False

    def run(self, name: str, part: Part, bench: Bench) -> None:
        """Measure a part if there is time for it, and write what is known. One that breaks down is named."""
        begin = time.perf_counter()
        try:
            if bench.left < part.needs:
                raise NotMeasured(f"{bench.left:.0f} s are left of the budget, and it needs {part.needs:.0f}")
            part.measure(bench, self.found)
        except NotMeasured as reason:
            self.found.left_out(name, str(reason))
        except Exception as error:  # whatever it is, the other parts are measured
            traceback.print_exc()
            self.found.left_out(name, f"{type(error).__name__}: {error}")
            self.failed = True
        mx.clear_cache()
        self.seconds[name] = round(time.perf_counter() - begin, 1)
        print(f"{time.perf_counter() - BEGIN:7.1f} s  {name}: {self.seconds[name]} s", flush=True)
        self.write()

    @property
    def bars(self) -> list[dict[str, Any]]:
        return [bar.judged(self.found.values.get(key), self.counts) for key, bar in BARS.items()]

    def write(self) -> None:
        whole = {
            **self.head,
            "label": self.found.label,
            "seconds": self.seconds,
            "bars_are_about_this": self.counts,
            "bars": self.bars,
            "not_measured": self.found.not_measured,
            "figures": self.found.figures,
        }
        write_atomically(self.path, json.dumps(whole, indent=1) + "\n")

    def table(self) -> Iterator[str]:
        width = 2 + max(len(bar.what + bar.unit) + 2 for bar in BARS.values())
        yield f"\n{'':<{width}}{'value':>10}{'bar':>8}  met"
        for bar in self.bars:
            value = "-" if bar["value"] is None else f"{bar['value']:.4g}"
            limit = (">=" if bar["sense"] == "at least" else "<=") + format(bar["bar"], "g")
            met = {None: "-", True: "yes", False: "NO"}[bar["met"]]
            yield f"{bar['what'] + ', ' + bar['unit']:<{width}}{value:>10}{limit:>8}  {met}"
        if not self.counts:
            yield f"no result: the bars are about the whole run of shape {FULL_SIZE} on a GPU"


@dataclass(frozen=True)
class Part:
    """Something to measure, and the seconds that must be left of the budget: those of what comes behind it, too, where
    it can take long."""

    measure: Callable[[Bench, Found], None]
    needs: float = 0


# The first is as cold as the process is. Profilers come last: they may slow down what comes after them.
PARTS = {
    "cold": Part(gpu_parts.cold),
    "decoding": Part(gpu_parts.decoding, 80),
    "verify": Part(gpu_parts.verify, 15),
    "rows": Part(gpu_parts.more_rows, 30),
    "prefill": Part(gpu_parts.prefill, 20),
    "parity": Part(gpu_parts.parity, 25),
    "long": Part(gpu_parts.long_context, 130),
    "kernels": Part(gpu_profile.kernels, 20),
    "profile": Part(gpu_profile.profile, 30),
}


def main() -> int:
    options = _options()
    extent = QUICK if options.quick else Extent()
    path = _writable(options.output or RESULTS / f"gpu_{options.shape}_{_short(gpu_parts.device_name())}.json")
    bench = Bench(options.shape, extent, options.budget)
    head = _head(options, extent, str(bench.dtype).removeprefix("mlx.core."))
    report = Report(path, head, counts=options.shape == FULL_SIZE and not options.quick and available())
    for name in options.parts:
        report.run(name, PARTS[name], bench)
    print("\n".join(report.table()))
    print(f"\n{report.found.label}\nwritten: {path}")
    return 1 if report.failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default=FULL_SIZE, help="of the model (default 27b: 16 GB)")
    parser.add_argument("--quick", action="store_true", help="less of everything; figures that are no results")
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="NAME", help="only these"
    )
    parser.add_argument("--budget", type=float, default=480, help="seconds from the start of the process (default 480)")
    parser.add_argument("--output", type=Path, help="the JSON file (default benchmarks/results/gpu_SHAPE_DEVICE.json)")
    return parser.parse_args()


def _writable(path: Path) -> Path:
    """The file to write, said before minutes of measuring, not after.

    Raises:
        SelfdraftError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SelfdraftError(f"{path.parent} cannot be written to ({error}); give another file with --output") from None
    if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
        raise SelfdraftError(f"{path} cannot be written; give another file with --output")
    return path


def _short(name: str) -> str:
    """For a file name: 'NVIDIA H200' -> 'nvidia-h200'."""
    return re.sub(r"[^\w.-]+", "-", name).lower()


def _head(options: argparse.Namespace, extent: Extent, dtype: str) -> dict[str, Any]:
    """What the figures belong to."""
    names = ("mlx", "mlx-lm", "mlx-cuda-13", "torch", "numpy")
    return {
        "schema_version": 1,
        "script": "benchmarks/gpu.py",
        "machine": {
            "device": gpu_parts.device_name(),
            "system": [platform.system(), platform.machine(), platform.python_version()],
            "cores": os.cpu_count(),
            "driver, power limit, clock": _driver(),
        },
        "versions": {"selfdraft": selfdraft.__version__, **{name: _version(name) for name in names}},
        "kernel_texts": sources_digest()[:16],
        "model": f"synthetic-{options.shape}",
        "dtype": dtype,
        "environment": gpu_environment.ENVIRONMENT,
        "parameters": {"acceptance": ACCEPTANCE, "depth": DEPTH, **SAMPLING, "quick": options.quick, **asdict(extent)},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """As nvidia-smi says it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SelfdraftError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        sys.exit(2)
