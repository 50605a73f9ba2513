"""All there is to measure of one model's speed, in one process and in turn; what goes into its report and picture."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import kernel_bench
from .adapter_effect import drafting, effect_line
from .ladders import context_ladder, prefill_ladder, verify_costs
from .measure import SEED, Spread, Tally, decode
from .peer import Peer, PeerError
from .peers import drafting_peers, mlx_lm_peers
from .plot import Bar, Bars, Lines, picture
from .subject import Subject

__all__ = ["QUICK", "USUAL", "Extent", "bench", "drawn", "table"]

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much is measured.

    Attributes:
        depths: of decoding, those that the head allows.
        rounds, prompts, tokens: of decoding: runs of each contender, prompts a run, tokens a prompt.
        widths, repeats: of verify passes.
        prefills, contexts: lengths in tokens, those that fit.
        peers: how many forms of stock mlx-lm decode beside us; prompts of growing length are read by the first.
        ladder_rounds, ladder_tokens: of both ladders; tokens decoded behind a context.
        kernels: whether kernels are timed, where there is a GPU.
    """

    depths: Sequence[int] = (1, 2, 3, 4, 5)
    rounds: int = 4
    prompts: int = 4
    tokens: int = 48
    widths: Sequence[int] = (1, 2, 4, 8, 16)
    repeats: int = 12
    prefills: Sequence[int] = (128, 512, 2048)
    contexts: Sequence[int] = (128, 512, 2048)
    ladder_rounds: int = 2
    peers: int = 2
    ladder_tokens: int = 32
    kernels: bool = True


USUAL = Extent()
QUICK = Extent(
    depths=(1, 3),
    rounds=2,
    prompts=2,
    tokens=24,
    widths=(1, 2, 4, 8),
    repeats=4,
    prefills=(64, 256),
    contexts=(64, 256),
    ladder_rounds=1,
    peers=1,
    ladder_tokens=16,
)


@dataclass
class _Contender:
    """Something that decodes prompts, and its runs, one a round."""

    name: str
    decode: Callable[[Sequence[Sequence[int]]], Tally]
    depth: int | None  # None for a peer
    peer: Peer | None = None
    runs: list[Tally] = field(default_factory=list)
    broken: str = ""  # why it is out of the race, if it is

    def turn(self, prompts: Sequence[Sequence[int]]) -> Tally:
        """Decode, unless it broke down: it does not take the others with it."""
        try:
            return Tally() if self.broken else self.decode(prompts)
        except PeerError as error:
            self.broken = f"{self.name}: {error}"
            return Tally()


def bench(
    subject: Subject,
    extent: Extent,
    tell: Tell = lambda line: None,
    gguf: Path | None = None,
    without: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure, and return the report.

    Args:
        without: of a model with an adapter, `drafting` of the same without.
        tell: called with a line before each part.
        gguf: the model for llama.cpp; else the one beside it.

    Raises:
        NonFiniteLogits: the model broke down.
    """
    tell("loading peers")
    peers, amiss = mlx_lm_peers(subject)
    depths = [depth for depth in extent.depths if depth <= subject.model.max_depth]
    with drafting_peers(subject, gguf) as (drafters, not_here):
        decoding, broken = _decoding(subject, [*peers[: extent.peers], *drafters], depths, extent, tell)
    deeper = [row for row in decoding if row["depth"]]
    fits = [length for length in extent.prefills if length + 2 <= subject.model.context_length]
    report: dict[str, Any] = {
        "schema_version": 1,
        "model": subject.name,
        "label": subject.label,
        "machine": [platform.system(), platform.machine(), str(mx.device_info().get("device_name", ""))],
        **{name: version(name) for name in ("selfdraft", "mlx", "mlx-lm")},
        **subject.described,
        "seed": SEED,
        "tokens": extent.tokens,
        "prompts": extent.prompts,
        "rounds": extent.rounds,
        "decoding": decoding,
        "adapter_effect": _effect(subject, extent, without),
        "prefill": prefill_ladder(subject, peers[:1], fits, extent.ladder_rounds, tell),
        "context": [],
    }
    if deeper:
        best = max(deeper, key=lambda row: row["tokens_per_second"]["median"])["depth"]
        room = subject.model.context_length - extent.ladder_tokens
        lengths = [length for length in extent.contexts if length <= room]
        report["context"] = context_ladder(subject, best, lengths, extent.ladder_tokens, extent.ladder_rounds, tell)
    tell("verify passes")
    report["verify"] = verify_costs(subject, extent.widths, extent.repeats)
    report["kernels"], left = _kernels(extent, tell)
    report["not_measured"] = [*amiss, *not_here, *broken, *left]
    return report


def _decoding(
    subject: Subject, peers: Sequence[Peer], depths: Sequence[int], extent: Extent, tell: Tell
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the report, and a line for each peer that broke down."""
    prompts = subject.prompts[: extent.prompts]
    contenders = [_Contender(peer.name, partial(peer.decode, tokens=extent.tokens), None, peer) for peer in peers]
    contenders += [
        _Contender(f"depth {depth}", partial(decode, subject.engine, depth=depth, tokens=extent.tokens), depth)
        for depth in (0, *depths)
    ]
    tell("warming up")
    for contender in contenders:
        contender.turn(prompts[:1])
    for number in range(extent.rounds):
        tell(f"decoding, round {number + 1} of {extent.rounds}")
        order = contenders if number % 2 == 0 else contenders[::-1]
        # All decode one prompt before the next: a machine that slows down for a while slows all of them.
        parts = [[(contender, contender.turn([prompt])) for contender in order] for prompt in prompts]
        for contender in contenders:
            mine = (run for part in parts for who, run in part if who is contender)
            contender.runs.append(sum(mine, Tally()))
    lines = [contender.broken for contender in contenders if contender.broken]
    contenders = [contender for contender in contenders if not contender.broken]
    ours = [contender for contender in contenders if contender.depth is not None]
    best = max(ours, key=lambda contender: Spread.of([run.rate for run in contender.runs]).median)
    first = next((contender for contender in contenders if contender.peer and not contender.peer.drafts), None)
    return [_row(contender, ours[0], best, first) for contender in contenders], lines


def _row(contender: _Contender, plain: _Contender, best: _Contender, peer: _Contender | None) -> dict[str, Any]:
    def ratio(base: _Contender) -> dict[str, float]:
        pairs = zip(contender.runs, base.runs, strict=True)
        return Spread.of([mine.rate / theirs.rate for mine, theirs in pairs]).rounded(3)

    total = sum(contender.runs, Tally())
    row: dict[str, Any] = {
        "name": contender.name,
        "depth": contender.depth,
        "tokens_per_second": Spread.of([run.rate for run in contender.runs]).rounded(),
        "ratio_to_plain": ratio(plain),
        "ratio_to_mlx_lm": ratio(peer) if peer else None,
    }
    if contender.peer:
        row |= {"version": contender.peer.version, "drafts": contender.peer.drafts, "ratio_to_ours": ratio(best)}
    if contender.depth is not None or (contender.peer and contender.peer.drafts and total.cycles):
        row["tokens_per_cycle"] = round(total.tokens / total.cycles, 3)
        row["acceptance"] = [round(rate, 4) for rate in total.acceptance]
    return row


def _effect(subject: Subject, extent: Extent, without: dict[str, Any] | None) -> dict[str, Any] | None:
    if without is None:
        return None
    return {"with": drafting(subject, extent.prompts, extent.tokens), "without": without}


def _kernels(extent: Extent, tell: Tell) -> tuple[dict[str, Any] | None, list[str]]:
    """Figures of kernels, or why there are none."""
    if not kernel_bench.available():
        return None, ["kernels: there is no GPU here, and they run on one only"]
    if not extent.kernels:
        return None, ["kernels: left out of a quick run"]
    tell("kernels")
    copied = kernel_bench.copy_speed()
    rows = list(kernel_bench.kernel_rows(copied))
    return {"checks": kernel_bench.checks(), "copy_bytes_per_second": copied, "rows": rows}, []


def table(report: dict[str, Any]) -> Iterator[str]:
    """The report for people, line by line."""
    yield _heading(report)
    if report["label"]:
        yield report["label"]
    yield from _decoding_table(report["decoding"])
    if report["adapter_effect"]:
        yield f"\n{effect_line(report)}"
    for title, steps in (("prompt tokens a second", report["prefill"]), ("tokens a second behind", report["context"])):
        if steps:
            names = list(steps[0]["tokens_per_second"])
            yield f"\n{title:<24}" + "".join(f"{name:>20}" for name in names)
        for step in steps:
            rates = (step["tokens_per_second"][name]["median"] for name in names)
            yield f"{step['tokens']:>10,} tokens" + " " * 7 + "".join(f"{rate:>20,.1f}" for rate in rates)
    verify = report["verify"]
    yield "\nverify cost v(M): " + "  ".join(f"{width}: {cost:.2f}" for width, cost in verify["v"].items())
    head = f"; a step of the head {verify['head_ms']:.2f} ms, c = {verify['head']:.2f}" if "head" in verify else ""
    yield f"one row {next(iter(verify['ms'].values())):.2f} ms{head}"
    if report["kernels"]:
        yield f"\ncopy {report['kernels']['copy_bytes_per_second'] / 1e9:.0f} GB/s"
        for row in report["kernels"]["rows"]:
            yield (
                f"{row['what']:<34}{row['ours_us']:>9.1f} us, MLX {row['mlx_us']:.1f}; "
                f"{row['share_of_copy']:.0%} of the copy"
            )
    yield ""
    yield from report["not_measured"]


def _decoding_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"\n{'':<28}{'tok/s':>8}  {'quartiles':<16}{'of plain':>9}{'of mlx-lm':>10}{'tok/cycle':>10}  acceptance"
    for row in rows:
        rates, peer = row["tokens_per_second"], row["ratio_to_mlx_lm"]
        quartiles = f"{rates['low']:.1f}-{rates['high']:.1f}"
        line = f"{row['name']:<28}{rates['median']:>8.1f}  {quartiles:<16}"
        line += f"{row['ratio_to_plain']['median']:>9.2f}" + (f"{peer['median']:>10.2f}" if peer else " " * 10)
        if row["depth"] != 0 and "tokens_per_cycle" in row:
            line += f"{row['tokens_per_cycle']:>10.2f}  " + " ".join(f"{rate:.2f}" for rate in row["acceptance"])
        yield line


def _heading(report: dict[str, Any]) -> str:
    where = f"{report['machine'][2] or report['machine'][1]} ({report['device']})"
    return f"{report['model']}: {report['dtype']} on {where}, BLAS {report['blas']}, mlx {report['mlx']}"


def drawn(report: dict[str, Any]) -> str:
    """The report as an SVG."""
    bars = [
        Bar(
            row["name"].replace("depth 0", "plain").replace("bfloat", "bf").replace("float", "fp"),
            row["tokens_per_second"]["median"],
            row["tokens_per_second"]["low"],
            row["tokens_per_second"]["high"],
            4 if row["depth"] is None else 0 if row["depth"] else 1,
        )
        for row in report["decoding"]
    ]
    verify = report["verify"]
    panels: list[Bars | Lines] = [
        Bars("Decoding", "tokens a second, median and quartiles", bars),
        Lines(
            "Cost of a verify pass",
            "relative to one row",
            list(verify["v"]),
            "rows M",
            [("v(M)", list(verify["v"].values()))],
        ),
    ]
    for title, unit, steps in (
        ("Prefill", "prompt tokens a second", report["prefill"]),
        ("Decoding behind a context", "tokens a second", report["context"]),
    ):
        if steps:
            names = list(steps[0]["tokens_per_second"])
            lines = [(name, [step["tokens_per_second"][name]["median"] for step in steps]) for name in names]
            panels.append(Lines(title, unit, [f"{step['tokens']:,}" for step in steps], "tokens", lines))
    if report["kernels"]:
        shares = [(row["what"], row["share_of_copy"]) for row in report["kernels"]["rows"] if ", 4 bits" in row["what"]]
        panels.append(
            Bars("4-bit products", "share of a copy's speed", [Bar(_size(what), s, s, s) for what, s in shares[:10]])
        )
    notes = [
        f"greedy, {report['prompts']} prompts of {report['tokens']} tokens, {report['rounds']} rounds in turn; "
        f"selfdraft {report['selfdraft']}, mlx-lm {report['mlx-lm']}"
    ]
    return picture(_heading(report), notes, report["label"], panels)


def _size(what: str) -> str:
    """'5120 x 17408, 4 bits, 8 rows' -> '8 rows of 5120x17408', which fits under a bar."""
    size, _, rows = what.split(", ")
    return f"{rows.split()[0]}: {size.replace(' ', '')}"
