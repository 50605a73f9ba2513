"""Guards `benchmarks/gpu.py`: it needs what the engine needs and no more, names what it leaves out, writes what it has
after every part, and its arithmetic is right on made-up times and events. Speeds are not asserted."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.errors import SelfdraftError
from selfdraft.tuning.kernel_bench import available

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

# Of the command line, the server, text and settings: a machine that is lent for its GPU may lack them.
FOREIGN = (
    *("typer", "rich", "llguidance", "starlette", "fastapi", "uvicorn", "prompt_toolkit", "prometheus_client"),
    *("pydantic", "pydantic_settings", "psutil", "markdown_it", "nh3", "pygments", "tomlkit", "ruamel"),
)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script in a process that cannot import FOREIGN."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({FOREIGN!r}))\n")
    paths = [str(folder), str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_a_quick_run_without_a_gpu(tmp_path: Path) -> None:
    if available():
        pytest.skip("there is a GPU here: it would be measured")
    path = tmp_path / "new" / "gpu.json"
    ended = run(tmp_path, "--shape", "tiny", "--quick", "--output", str(path))
    assert ended.returncode == 0, ended.stderr
    report = json.loads(path.read_text())
    assert report["label"].startswith("SYNTHETIC")
    for part in ("kernels", "profile"):
        assert f"{part}: not measured: no GPU" in report["not_measured"]
        assert f"{part}: not measured: no GPU" in ended.stdout
    bars = {f"{bar['what']}, {bar['unit']}": bar for bar in report["bars"]}
    assert len(bars) == len(report["bars"])
    assert not any(bar["met"] for bar in bars.values()), "a tiny model meets no bar of a large one"
    assert bars["host synchronisations, a cycle"]["value"] == 1
    assert bars["depth 3 over mlx-lm AR, tokens/s, times"]["value"] > 0, "mlx-lm was left out"
    assert bars["4-bit 5120x17408, one row, by GPU time, of the copy's bandwidth"]["value"] is None
    assert all(bar["value"] is not None for what, bar in bars.items() if what.startswith("logits"))
    assert list(report["seconds"]) == list(PARTS)
    decoding = report["figures"]["decoding"]
    assert decoding["depth 0, 1 row, 32 tokens"]["tokens_per_cycle"] == 1
    assert decoding["depth 3, 1 row, 32 tokens"]["tokens_per_cycle"] > 2  # 3.7 are planted, and eight cycles are few


PARTS = ("cold", "decoding", "verify", "rows", "prefill", "parity", "long", "kernels", "profile")


def test_bad_input_is_refused_before_anything_is_measured(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = module("gpu")
    monkeypatch.setattr(gpu.Report, "run", lambda *_: pytest.fail("something is measured"))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--shape", "28b"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    said = capsys.readouterr().err
    assert "28b" in said
    assert "27b" in said
    (tmp_path / "file").touch()
    for taken in (tmp_path, tmp_path / "file" / "gpu.json"):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--shape", "tiny", "--quick", "--output", str(taken)])
        with pytest.raises(SelfdraftError, match="give another file with --output"):
            gpu.main()


def test_bad_input_is_told_without_a_traceback(tmp_path: Path) -> None:
    ended = run(tmp_path, "--shape", "tiny", "--output", str(tmp_path))
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [f"gpu.py: {tmp_path} cannot be written; give another file with --output"]


def test_a_part_that_fails_or_has_no_time_is_named_and_the_rest_is_written(tmp_path: Path, module: Any) -> None:
    gpu, turns = module("gpu"), module("gpu_turns")
    report = gpu.Report(tmp_path / "gpu.json", {}, counts=True)

    def fails(bench: Any, found: Any) -> None:
        found.values["step"] = 10.0
        raise RuntimeError("out of memory")

    def works(bench: Any, found: Any) -> None:
        found.values["rows"] = 3.9

    bench = turns.Bench("tiny", turns.QUICK, budget=1e9)
    report.run("first", gpu.Part(fails), bench)
    assert report.failed
    report.run("second", gpu.Part(works, needs=1e8), bench)
    late = turns.Bench("tiny", turns.QUICK, budget=5)
    report.run("third", gpu.Part(works, needs=1e8), late)
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["not_measured"][0] == "first: not measured: RuntimeError: out of memory"
    assert "third: not measured: " in written["not_measured"][1]
    assert "budget" in written["not_measured"][1]
    met = {bar["what"]: bar["met"] for bar in written["bars"]}
    assert met["AR step, sampled"] is True  # what was known before it failed
    assert met["eight rows over one, depth 3, tokens/s"] is False
    assert met["AR step, greedy"] is None


def test_a_rejection_is_charged_to_the_cycle_behind_it(module: Any) -> None:
    """One of ten cycles falls; the one behind it takes 11 ms, all others 10. Off by one, nothing would be seen."""
    parts, turns = module("gpu_parts"), module("gpu_turns")
    emitted = ([4] * 5 + [2] + [4] * 4) * 4
    times = [0.011 if place and emitted[place - 1] == 2 else 0.010 for place in range(len(emitted))]
    found = turns.Found()
    parts.commit([turns.Round(times, emitted, [1e-5] * len(times))], found)
    assert found.figures["commit"]["share"] == pytest.approx(0.1)


def test_busy_time_and_gaps_of_events_that_overlap(module: Any) -> None:
    profile = module("gpu_profile").Profile([(100, 50, "a"), (120, 10, "b"), (140, 60, "a"), (260, 40, "c")], {})
    assert profile.busy == 100 + 40
    assert profile.span == 200
    assert profile.gaps == [(60, "c")]
    assert list(profile.by_name()) == ["a", "c", "b"]
    assert profile.kernels(2)[0] == {"name": "a", "runs": 1.0, "us": 0.06, "us_a_run": 0.06}


@pytest.fixture
def stand_in(module: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`gpu_profile` on a CPU: MLX's product in place of the kernel, and a profiler that sees two kernels a call."""
    profile: ModuleType = module("gpu_profile")

    def profiled(call: Any) -> Any:
        call()
        return profile.Profile([(0, 30_000, "main"), (60_000, 10_000, "other")], {"cudaEventSynchronize": 3})

    def product(x: mx.array, *matrix: mx.array, **how: Any) -> mx.array:
        return mx.quantized_matmul(x, *matrix, transpose=True, **how)

    small = {"INPUTS": 128, "OUTPUTS": 256, "COUNT": 2, "COPIED": 4096, "available": lambda: True}
    for name, value in {**small, "verify_qmv": product, "profiler": lambda: profiled}.items():
        monkeypatch.setattr(profile, name, value)
    return profile


def test_parts_of_the_gpu_clock(stand_in: ModuleType, module: Any) -> None:
    turns, parts, found = module("gpu_turns"), module("gpu_parts"), module("gpu_turns").Found()
    bench = turns.Bench("tiny", turns.QUICK, budget=1e9)
    stand_in.kernels(bench, found)
    nbytes = found.figures["kernels"]["bytes"]
    assert nbytes["copy"] == 2 * 2 * 4096
    assert nbytes["1 rows"] == 256 * 128 // 2 + 2 * 2 * 256 * 2 + 2 * (128 + 256)  # words, scales and biases, x and y
    assert found.values["qmv share"] == pytest.approx(nbytes["1 rows"] / nbytes["copy"])  # all take 30 us there
    assert found.values["qmv rows"] == 1
    cycle = {"cycle_ms_mean": 0.08 / bench.extent.profiled}
    found.figures["decoding"] = {f"depth {depth}, 1 row, {bench.extent.context} tokens": cycle for depth in (0, 3)}
    found.figures["commit"] = {"cycle_ms": 1.0}
    stand_in.profile(bench, found)
    assert found.values["idle"] == pytest.approx(40 / 80)  # two kernels of 40 us in all, cycles of 80
    assert found.values["commit"] == 0
    assert len(found.figures["forward_by_kept_ms"]) == 3
    assert found.values["verify GPU"] == 1
    cycle = next(iter(found.figures["profiled_cycles"].values()))
    assert cycle["calls_that_may_wait"] == {"cudaEventSynchronize": 3 / bench.extent.profiled}
    assert cycle["gaps_over_5_us"]["longest"] == [{"us": 30.0, "before": "other"}]
    assert parts.device_name() == "cpu" or available()


def test_a_nan_among_differences_is_not_lost(module: Any) -> None:
    parts = module("gpu_parts")
    assert parts.largest([0.0, 2.0, 1.0]) == 2.0
    assert math.isnan(parts.largest([0.0, math.nan, 1.0]))
