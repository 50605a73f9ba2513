"""Guards that `verify` says yes to what drafts well here and no, with the reason, to everything else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft import CheckpointError, SelfdraftError, load
from selfdraft.forge import Recipe, build, exactness, verify
from selfdraft.forge.exactness import Exactness
from selfdraft.forge.wiring import AS_BUILT
from selfdraft.source import REFERENCE, find_model
from selfdraft.stamp import STAMP, digests, read_stamp, write_stamp
from selfdraft.tuning.measure import Tally
from selfdraft.tuning.tune import Candidate, Tuning
from tests.support.checkpoints import Tensors, add_text_side, is_zero_centred, save

from .support import nano_source

MODULE = sys.modules[verify.__module__]  # of which the package shows the function alone
CONFIG = json.loads((find_model(REFERENCE) / "config.json").read_text())


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "TOKENS", 5)
    monkeypatch.setattr(exactness, "HELD_OUT", exactness.HELD_OUT[:2])


@pytest.fixture(scope="module")
def reference() -> Tensors:
    return mx.load(str(find_model(REFERENCE) / "model.safetensors"))  # type: ignore[return-value]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A nano package, taken for one that drafts well."""
    monkeypatch.setattr(MODULE, "wirings", lambda *given: {AS_BUILT: 0.6})
    return build(nano_source(tmp_path / "source"), tmp_path / "package", Recipe.named("4bit", head="dense")).folder


def timed(monkeypatch: pytest.MonkeyPatch, *rates: float) -> list[Any]:
    """Speeds of plain decoding and of depths, in tokens a second."""
    asked: list[Any] = []

    def tune(name: str, found: dict[str, Any], **given: Any) -> Tuning:
        asked.append({"name": name, "stamp": read_stamp(Path(name)), **given})
        runs = [[Tally(100, 100 / rate, 100 // (depth + 1)) for _ in range(3)] for depth, rate in enumerate(rates)]
        candidates = [Candidate(depth, each) for depth, each in enumerate(runs)]
        return Tuning(name, {"folder": name}, given["tokens"], candidates)

    monkeypatch.setattr(MODULE, "describe", lambda name: {"max_depth": 8})
    monkeypatch.setattr(MODULE, "tune", tune)
    return asked


def test_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = build(find_model(REFERENCE), tmp_path / "package", Recipe.named("dense", head="dense")).folder
    timed(monkeypatch, 40, 50, 60, 55, 30)
    stamp = verify(package)
    assert (stamp.verdict, stamp.reasons, stamp.depth_limit) == ("yes", (), 3)
    assert stamp == read_stamp(package)
    assert stamp.files == digests(package)
    found = stamp.evidence
    assert found["finite"] is True
    assert found["exactness"]["equal_by_depth"] == {"1": 2, "2": 2, "4": 2}
    assert found["exactness"]["rows"] == {"2": 0, "3": 0, "4": 0, "5": 0}  # reference BLAS, where parity is promised
    assert found["exactness"]["largest_gap"] is None
    assert max(found["wiring"], key=found["wiring"].__getitem__) == "as built"
    assert [row["depth"] for row in found["speed"]["candidates"]] == [0, 1, 2, 3, 4]
    assert load(str(package)).max_depth == 3
    text = (package / STAMP).read_text()
    for private in (str(package.parent), str(Path.home()), os.uname().nodename, "belongs_to"):
        assert private not in text


def test_what_an_earlier_answer_limited_is_measured_anew(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 40, 50, 30, 30, 30)
    first = verify(package)
    assert first.depth_limit == 1
    asked = timed(monkeypatch, 40, 50, 60, 70, 80)
    verify(package)
    again = read_stamp(package)
    assert again is not None
    assert again.depth_limit is None  # the deepest that was measured pays
    assert asked[0]["stamp"].depth_limit is None
    assert again.evidence["max_depth"] == first.evidence["max_depth"] == 8
    assert (again.recipe, again.source, again.head) == (first.recipe, first.source, first.head)


@pytest.mark.parametrize("rates", [(40, 39, 30, 20, 10), (40, 40, 40, 40, 40)])
def test_no_depth_is_faster(package: Path, monkeypatch: pytest.MonkeyPatch, rates: tuple[float, ...]) -> None:
    timed(monkeypatch, *rates)
    stamp = verify(package)
    assert (stamp.verdict, stamp.depth_limit) == ("no", None)
    assert stamp.reasons == ("no depth decodes faster than plain decoding here",)
    assert load(str(package)).notes == [f"`forge verify` said no: {stamp.reasons[0]}"]


def test_speed_may_be_left_out(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "tune", None)
    stamp = verify(package, speed=False)
    assert (stamp.verdict, stamp.depth_limit) == ("yes", None)
    assert "speed" not in stamp.evidence


def test_changed_files_are_told(package: Path) -> None:
    verify(package, speed=False)
    lines: list[str] = []
    verify(package, speed=False, tell=lines.append)
    assert not any("changed" in line for line in lines)
    path = package / "tokenizer_config.json"
    path.write_text(path.read_text() + "\n")
    verify(package, speed=False, tell=lines.append)
    assert "changed since it was verified: tokenizer_config.json" in lines


def test_one_that_is_broken_off_leaves_no_answer(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify(package, speed=False)

    def broken_off(llm: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(exactness, "measure", broken_off)
    with pytest.raises(KeyboardInterrupt):
        verify(package, speed=False)
    stamp = read_stamp(package)
    assert stamp is not None
    assert (stamp.verdict, stamp.files, stamp.evidence) == ("", {}, {})


def test_where_nothing_can_be_written_nothing_is_measured(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MODULE, "write_stamp", full)
    monkeypatch.setattr(MODULE, "_judged", None)
    with pytest.raises(SelfdraftError, match="No space left on device"):
        verify(package, speed=False)


def test_an_unreadable_stamp_is_refused(tmp_path: Path) -> None:
    folder = nano_source(tmp_path / "model")
    (folder / STAMP).write_text("{")
    with pytest.raises(CheckpointError, match="delete it"):
        verify(folder, speed=False)


# ---- what gets a no


def answered(folder: Path) -> str:
    stamp = verify(folder, speed=False)
    assert (stamp.verdict, stamp.depth_limit, len(stamp.reasons)) == ("no", None, 1)
    assert stamp.source == folder.name
    return stamp.reasons[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(tmp_path: Path, value: float) -> None:
    folder = nano_source(tmp_path / "model")
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    tensors = {name: mx.array(tensor) for name, tensor in tensors.items()}
    mx.eval(tensors)
    tensors["mtp.fc.weight"][3, 4] = value
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    assert answered(folder) == "mtp.fc.weight holds values that are not finite"


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    folder = nano_source(tmp_path / "model")
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    tensors = {name: tensor * (3e38 if name == "lm_head.weight" else 1) for name, tensor in tensors.items()}
    tensors = {name: mx.where(mx.isinf(tensor), 3e38, tensor) for name, tensor in tensors.items()}
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    assert "NaN or infinite" in answered(folder) or "not finite" in answered(folder)


def test_a_head_that_drafts_nothing(tmp_path: Path) -> None:
    assert "below 20%, and no better in another wiring" in answered(nano_source(tmp_path / "model"))


def test_no_head(tmp_path: Path, reference: Tensors) -> None:
    trunk = {name: tensor for name, tensor in reference.items() if not name.startswith("mtp.")}
    folder = add_text_side(save(tmp_path / "model", trunk, CONFIG))
    assert answered(folder) == "config.json claims 1 MTP layer(s), but the weights hold no mtp tensors"


def test_the_head_of_another_trunk(tmp_path: Path, reference: Tensors) -> None:
    trunk = {name: tensor for name, tensor in reference.items() if not name.startswith("mtp.")}
    random = np.random.default_rng(0)
    head = {
        name: tensor if "norm" in name else mx.array(random.normal(size=tensor.shape).astype(np.float32) * 0.05)
        for name, tensor in reference.items()
        if name.startswith("mtp.")
    }
    folder = add_text_side(save(tmp_path / "model", trunk, CONFIG, beside=head))
    assert "it was not trained with this trunk" in answered(folder)


# ---- wrong labels, and what mends them


def hidden_first(name: str, tensor: mx.array) -> mx.array:
    return mx.concatenate(mx.split(tensor, 2, axis=-1)[::-1], axis=-1) if name == "mtp.fc.weight" else tensor


def one_plus(name: str, tensor: mx.array) -> mx.array:
    return tensor + 1 if name.startswith("mtp.") and is_zero_centred(name) else tensor


@pytest.mark.parametrize(
    ("change", "given", "flags"),
    [
        (hidden_first, {}, {"head_order": "hidden-first"}),
        (lambda name, tensor: tensor, {"head_order": "hidden-first"}, {"head_order": "embedding-first"}),
        (one_plus, {"head_norms": "zero-centred"}, {"head_norms": "one-plus"}),
    ],
)
def test_wrong_labels(
    tmp_path: Path,
    reference: Tensors,
    change: Callable[[str, mx.array], mx.array],
    given: dict[str, Any],
    flags: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exactness, "measure", lambda llm: parted(None, 0.0))
    tensors = {name: change(name, tensor) for name, tensor in reference.items()}
    source = add_text_side(save(tmp_path / "source", tensors, CONFIG))
    wrong = build(source, tmp_path / "wrong", Recipe.named("dense", head="dense", **given)).folder
    stamp = verify(wrong, speed=False)
    ((name, value),) = flags.items()
    assert stamp.reasons[0].endswith(f"build it again with --{name.replace('_', '-')} {value}")
    right = build(source, tmp_path / "right", Recipe.named("dense", head="dense", **{**given, **flags})).folder
    assert verify(right, speed=False).verdict == "yes"


# ---- exactness


def parted(gap: float | None, rounding: float) -> Exactness:
    return Exactness(2, 5, {"1": 1}, {"2": 0.0}, gap, rounding)


def test_answers_may_part_within_rounding_alone() -> None:
    assert parted(None, 0.0).problem == ""
    assert parted(0.1, 0.2).problem == ""
    assert "0.3 apart, where rounding explains 0.2" in parted(0.3, 0.2).problem


def test_an_answer_that_parts_is_a_no(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = exactness._answers

    def wrong(llm: Any, prompts: Any, depth: int) -> list[list[int]]:
        found = plain(llm, prompts, depth)
        if depth == 2:
            found[1][2] += 1
        return found

    monkeypatch.setattr(exactness, "_answers", wrong)
    stamp = verify(package, speed=False)
    assert stamp.verdict == "no"
    assert "a drafted answer parts from plain decoding" in stamp.reasons[0]
    assert stamp.evidence["exactness"]["equal_by_depth"] == {"1": 2, "2": 1, "4": 2}
    write_stamp(package, replace(stamp, verdict="", reasons=()))
