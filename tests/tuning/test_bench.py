"""Guards what `bench` reports and draws: every part is there, a synthetic model says so everywhere, the picture is SVG.

Speeds are not asserted: tests share their cores. What is compared are counts, labels, and geometry of the picture.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

import mlx.core as mx
import pytest

from selfdraft.engine import Engine
from selfdraft.settings import load_settings
from selfdraft.tuning import bench as benching
from selfdraft.tuning.bench import Extent, bench, drawn, table
from selfdraft.tuning.ladders import verify_costs
from selfdraft.tuning.measure import Tally
from selfdraft.tuning.peer import Peer, PeerError
from selfdraft.tuning.peers import mlx_lm_peers
from selfdraft.tuning.plot import Bar, Bars, Lines, picture
from selfdraft.tuning.subject import Subject, planted

SMALL = Extent(
    depths=(1, 2, 99),
    rounds=2,
    prompts=1,
    tokens=6,
    widths=(1, 2),
    repeats=1,
    prefills=(8, 16, 10**9),
    contexts=(8, 10**9),
    ladder_rounds=1,
    ladder_tokens=6,
)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def subject() -> Subject:
    return planted("tiny", load_settings(dtype="float32"), acceptance=(1.0, 0.0))


@pytest.fixture(scope="module")
def report(subject: Subject) -> dict[str, object]:
    return bench(subject, SMALL)


def test_every_part_is_there(report: dict[str, object]) -> None:
    assert json.loads(json.dumps(report)) == report
    names = [row["name"] for row in report["decoding"]]  # type: ignore[attr-defined]
    assert names == ["mlx-lm float32", "depth 0", "depth 1", "depth 2"]  # 99 is deeper than any head
    assert [step["tokens"] for step in report["prefill"]] == [8, 16]  # type: ignore[attr-defined]
    assert [step["tokens"] for step in report["context"]] == [8]  # type: ignore[attr-defined]
    assert list(report["verify"]["v"]) == ["1", "2"]  # type: ignore[index]
    assert report["verify"]["head_ms"] > 0  # type: ignore[index]
    assert any("mlx-vlm" in line for line in report["not_measured"])  # type: ignore[attr-defined]


def test_figures_are_those_of_the_planted_process(report: dict[str, object]) -> None:
    """Every first draft stays, every second one falls: two tokens a cycle at depths 1 and 2, in whatever time."""
    rows = {row["name"]: row for row in report["decoding"]}  # type: ignore[attr-defined]
    assert rows["depth 0"]["tokens_per_cycle"] == 1
    assert rows["depth 0"]["ratio_to_plain"]["median"] == 1
    assert rows["depth 2"]["acceptance"][0] == 1
    assert rows["depth 2"]["acceptance"][1] < 0.2
    assert rows["mlx-lm float32"]["ratio_to_mlx_lm"]["median"] == 1
    for row in rows.values():
        rates = row["tokens_per_second"]
        assert 0 < rates["low"] <= rates["median"] <= rates["high"]


def test_synthetic_is_said_everywhere(report: dict[str, object]) -> None:
    assert str(report["label"]).startswith("SYNTHETIC")
    assert any(line.startswith("SYNTHETIC") for line in list(table(report))[:2])
    assert "SYNTHETIC" in drawn(report)
    assert "synthetic" in str(report["model"])


def test_kernels_are_named_where_there_is_no_gpu(report: dict[str, object]) -> None:
    if mx.default_device() == mx.cpu:
        assert report["kernels"] is None
        assert any("no GPU" in line for line in report["not_measured"])  # type: ignore[attr-defined]


def test_the_table_of_kernels_and_its_panel(report: dict[str, object]) -> None:
    row = {"what": "5120 x 17408, 4 bits, 8 rows", "ours_us": 20.0, "mlx_us": 40.0, "bytes": 5, "share_of_copy": 0.6}
    kernels = {"checks": {}, "copy_bytes_per_second": 3e12, "rows": [row]}
    shown = {**report, "kernels": kernels}
    assert any("60% of the copy" in line for line in table(shown))
    assert "5120x17408" in drawn(shown)


def test_the_peer_has_the_shape_and_reads_every_matrix(subject: Subject) -> None:
    """It decodes something else, but in the same shapes: equal bytes of weights, but for our head's."""
    (peer,), amiss = mlx_lm_peers(subject)
    assert not amiss
    from mlx.utils import tree_flatten

    def size(module: object) -> int:
        parameters = tree_flatten(module.parameters())  # type: ignore[attr-defined]
        return sum(tensor.nbytes for name, tensor in parameters if not name.startswith("mtp."))

    assert size(peer.model) == pytest.approx(size(subject.model), rel=1e-3)
    total = peer.decode(subject.prompts[:2], 5)
    assert (total.tokens, total.cycles) == (8, 8)
    assert bool(mx.all(mx.isfinite(peer.model(mx.array([[1, 2, 3]])))))


def test_a_peer_that_cannot_load_is_a_line(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: object) -> None:
        raise ValueError("unknown quantisation\nand more")

    monkeypatch.setattr("selfdraft.tuning.peers._likewise", broken)
    peers, amiss = mlx_lm_peers(subject)
    assert peers == []
    assert amiss == ["mlx-lm: cannot load this model (ValueError: unknown quantisation)"]
    alone = bench(subject, SMALL)
    assert alone["decoding"][0]["ratio_to_mlx_lm"] is None
    assert list(table(alone))
    assert drawn(alone)


def test_verify_costs_leave_the_state_alone(subject: Subject) -> None:
    """Each width is timed behind the same tokens: v(1) is 1 by definition, and a second look gives the same keys."""
    costs = verify_costs(subject, (1, 4), 2)
    assert costs["v"]["1"] == 1
    assert costs["ms"]["4"] > 0


def test_order_alternates(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def decode(engine: Engine, prompts: object, depth: int, tokens: int) -> object:
        asked.append(depth)
        return Tally(10, 1.0, 5, 0.1, [5], [5])

    monkeypatch.setattr(benching, "decode", decode)
    no_peers: list[Peer] = []
    benching._decoding(subject, no_peers, [1, 2], Extent(rounds=2), lambda line: None)
    assert asked == [0, 1, 2, *[0, 1, 2] * 4, *[2, 1, 0] * 4]  # warm-up; prompt by prompt, there and back


@dataclass
class StandIn:
    """A peer that breaks down after so many turns."""

    name: str
    drafts: int
    turns: int
    version: str = "7"

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> Tally:
        self.turns -= 1
        if self.turns < 0:
            raise PeerError("it is gone")
        return Tally(10, 0.5, 4, 0.1, [4], [3])


def test_peers_take_their_turn_and_one_that_breaks_down_is_a_line(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may break down in its warm-up or in a round; what the others measured is kept either way."""
    left: list[str] = []
    fast, weak, broken = StandIn("fast", 3, 99), StandIn("weak", 2, 2), StandIn("broken", 2, 0)

    @contextlib.contextmanager
    def drafting_peers(subject: Subject, gguf: object) -> Iterator[tuple[list[Peer], list[str]]]:
        yield [fast, weak, broken], ["absent: not installed"]
        left.append("ended")

    monkeypatch.setattr(benching, "drafting_peers", drafting_peers)
    report = bench(subject, SMALL)
    assert left == ["ended"]
    assert (weak.turns, broken.turns) == (-1, -1)  # not asked again
    rows = {row["name"]: row for row in report["decoding"]}
    assert list(rows) == ["mlx-lm float32", "fast", "depth 0", "depth 1", "depth 2"]
    row = rows["fast"]
    assert (row["version"], row["drafts"], row["depth"]) == ("7", 3, None)
    assert row["tokens_per_second"] == {"median": 20, "low": 20, "high": 20}
    assert (row["tokens_per_cycle"], row["acceptance"]) == (2.5, [0.75])
    ours = max(rows[name]["tokens_per_second"]["median"] for name in ("depth 0", "depth 1", "depth 2"))
    assert row["ratio_to_ours"]["low"] <= 20 / ours * 1.01
    assert row["ratio_to_ours"]["high"] >= 20 / ours * 0.99
    assert (rows["mlx-lm float32"]["drafts"], rows["mlx-lm float32"]["version"]) == (0, report["mlx-lm"])
    assert report["not_measured"][:3] == ["absent: not installed", "weak: it is gone", "broken: it is gone"]
    shown = "\n".join(table(report))
    assert re.search(r"^fast .* 2\.50  0\.75$", shown, re.MULTILINE)
    assert "weak: it is gone" in shown
    assert drawn(report)


def parsed(*panels: Bars | Lines, warning: str = "") -> ElementTree.Element:
    return ElementTree.fromstring(picture("a <b> & c", ["note"], warning, panels))


def test_bars_are_as_high_as_their_values() -> None:
    root = parsed(Bars("t", "u", [Bar("one two", 10, 9, 11), Bar("x", 30, 30, 30), Bar("y", 0, 0, 0)]))
    heights = [float(r.get("height", "0")) for r in root.iter(f"{SVG}rect")][1:]
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.01)
    assert heights[2] == 0
    assert all(0 <= float(r.get("y", "0")) <= 340 for r in root.iter(f"{SVG}rect"))


def test_lines_skip_what_was_not_measured_and_stay_inside() -> None:
    root = parsed(Lines("t", "u", ["1", "2", "4"], "rows", [("a", [1.0, None, 3.0]), ("b", [0.5, 2.0, 2.5])]))
    lines = [line.get("points", "").split() for line in root.iter(f"{SVG}polyline")]
    assert [len(line) for line in lines] == [2, 3]
    assert float(lines[0][0].split(",")[1]) > float(lines[0][1].split(",")[1])  # 3 stands above 1
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"3.00", "0.50", "2.00"} <= set(texts)


def test_the_picture_says_its_warning_and_escapes_its_texts() -> None:
    bars = Bars("t", "u", [Bar("x", 1, 1, 1)])
    assert "a <b> & c" in [text.text for text in parsed(bars).iter(f"{SVG}text")]
    warned = [text for text in parsed(bars, warning="SYNTHETIC").iter(f"{SVG}text") if text.get("class") == "warn"]
    assert [text.text for text in warned] == ["SYNTHETIC"]


@pytest.mark.parametrize("largest", [1e-6, 0.02, 1.0, 7.3, 99.0, 12_345.0, 0.0])
def test_the_axis_holds_every_value(largest: float) -> None:
    root = parsed(Bars("t", "u", [Bar("x", largest, largest, largest)]))
    numbers = [
        float(text.text.replace(",", ""))
        for text in root.iter(f"{SVG}text")
        if text.get("class") == "faint" and re.fullmatch(r"[\d.,e-]+", text.text or "")
    ]
    assert max(numbers) >= largest
    assert 3 <= len(numbers) <= 8
