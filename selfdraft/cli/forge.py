"""`selfdraft forge`: from a source checkpoint to a package that runs, with what was measured of it. Decides nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import InvalidRequest
from .command import command
from .flags import flag, refusal, whole
from .found_models import gigabytes
from .rows import show_rows, show_table
from .terminal import Bar, dim, say

if TYPE_CHECKING:
    from ..forge.build import Built
    from ..forge.head import HeadOutcome
    from ..forge.recipe import Recipe
    from ..stamp import Stamp

__all__ = ["app"]

_UNITS: dict[str, Literal["bytes", "tokens", "answers"]] = {"weights": "bytes", "acceptance": "answers"}

app = typer.Typer(help="Make a package of a checkpoint: quantised, its head calibrated, measured here.")

Source = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A local folder or a Hugging Face id, or 'reference'.", show_default=False),
]
Package = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Of a package that `forge build` made.", show_default=False)
]
Verified = Annotated[Path, typer.Argument(metavar="FOLDER", help="A package, or any model folder.", show_default=False)]
AsJson = Annotated[bool, flag("--json", "Print one JSON object, with a schema_version. Default: off.")]


@dataclass(frozen=True, kw_only=True)
class RecipeFlags:
    """How a package is made."""

    recipe: Annotated[
        str,
        flag(
            "--recipe",
            "4bit: 4 bits, embedding and output projection 8. 8bit: 8 bits. mixed: 4, 6 and 8, more where few hurt. "
            "dense: not quantised. Default: 4bit.",
            None,
            "NAME",
        ),
    ] = "4bit"
    bits: Annotated[
        int | None,
        flag(
            "--bits",
            "Least bits of the trunk's layers: 3, 4, 5, 6, 8, or 16 for dense. Default: the recipe's.",
            None,
            "N",
            whole,
        ),
    ] = None
    group: Annotated[int, flag("--group", "Group size: 32, 64 or 128. Default: 64.", None, "N", whole)] = 64
    rules: Annotated[
        list[str] | None,
        flag(
            "--set",
            "Bits of the layers whose path fits a pattern, as in 'model.layers.0.*=8'; may be given again, the last "
            "that fits decides. Default: the recipe's.",
            None,
            "PATTERN=BITS",
        ),
    ] = None
    head: Annotated[
        Literal["auto", "dense", "4bit", "4bit-naive"],
        flag(
            "--head",
            "dense; 4bit: calibrated on the model's own answers; 4bit-naive: rounded; auto: whichever drafts best, all "
            "measured. Default: auto.",
            None,
            "WAY",
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16"],
        flag(
            "--dtype",
            "Of what is not quantised: bfloat16, or float16, for M1 and M2; auto: float16 if the source has that, else "
            "bfloat16. Default: auto.",
            None,
            "TYPE",
        ),
    ] = "auto"
    sibling: Annotated[
        bool,
        flag(
            "--fp16-sibling",
            "Also make FOLDER-fp16, for M1 and M2, as --dtype float16 --output FOLDER-fp16 alone does. Default: off.",
        ),
    ] = False
    draft_vocabulary: Annotated[
        int,
        flag(
            "--draft-vocabulary",
            "Let the head draft the first N ids only, 256 or more; 0 for all. Default: 0.",
            None,
            "N",
            whole,
        ),
    ] = 0
    head_order: Annotated[
        Literal["embedding-first", "hidden-first"],
        flag(
            "--head-order",
            "What the head's projection takes first in the source. Default: embedding-first.",
            None,
            "ORDER",
        ),
    ] = "embedding-first"
    head_norms: Annotated[
        Literal["auto", "zero-centred", "one-plus"],
        flag(
            "--head-norms", "How the source stores the head's norms; auto: by their values. Default: auto.", None, "WAY"
        ),
    ] = "auto"

    def recipes(self) -> list[Recipe]:
        """The recipe, and that of the sibling. Raises typer.BadParameter for a value that is not possible."""
        from ..forge.recipe import Recipe

        try:
            given: dict[str, Any] = {
                "group_size": self.group,
                "rules": Recipe.parse_rules(self.rules or ()),
                "head": self.head,
                "draft_vocabulary": self.draft_vocabulary,
                "head_order": self.head_order,
                "head_norms": self.head_norms,
            }
            if self.bits is not None:
                given["bits"] = self.bits
            dtypes = [self.dtype, *(["float16"] if self.sibling else [])]
            return [Recipe.named(self.recipe, dtype=dtype, **given) for dtype in dict.fromkeys(dtypes)]
        except InvalidRequest as error:
            raise refusal(error) from error


@app.command("probe")
@command
def probe(source: Source, *, as_json: AsJson = False) -> None:
    """Say what a checkpoint is and what could be built of it here.

    Reads the headers of its files alone: kind, head, norms, the size of each
    recipe's package, and whether disk and memory suffice.
    """
    _choose_blas()
    from ..forge.probe import probe as look

    report = look(_found(source))
    if as_json:
        print(json.dumps(report))
        return
    head = report["head"]
    rows = [
        ("folder", report["folder"]),
        ("type", report["model_type"]),
        ("family", report["verified"] or "nothing independent to compare it with"),
        (
            "weights",
            f"{gigabytes(report['bytes'])}, {report['dtype']}{', quantised' * report['quantised']}, {report['layout']} "
            "layout",
        ),
        ("MTP head", f"{head['source']}, {head['tensors']} tensors" if head["usable"] else f"none: {head['reason']}"),
        ("norms", f"trunk {report['norms']['trunk']}, head {report['norms']['head'] or 'none'}"),
        *(("note", note) for note in report["notes"]),
    ]
    show_rows(rows)
    sizes = [
        (name, gigabytes(each["bytes"]), "yes" if each["fits_disk"] else "NO", "yes" if each["fits_memory"] else "NO")
        for name, each in report["recipes"].items()
    ]
    show_table(("recipe", "size", "disk suffices", "memory suffices"), sizes)


@app.command("build")
@command
def build(
    source: Source,
    *,
    output: Annotated[Path, flag("--output -o", "Folder of the package; must not be there yet.", None, "FOLDER")],
    making: RecipeFlags,
    as_json: AsJson = False,
) -> None:
    """Quantise a checkpoint, calibrate its head, and write a package.

    Weights are streamed, one tensor in memory at a time. The head is then
    measured on the model's own answers: dense, rounded and calibrated; that
    takes the whole package in memory, --head dense does not. A build that was
    interrupted goes on where it ended; the folder appears when all of it is
    there.
    """
    _choose_blas()
    from ..forge.build import build as make
    from ..forge.workplace import refuse_target

    recipes = making.recipes()
    folder = _found(source)
    output = Path(os.path.abspath(output.expanduser()))
    targets = [output, *(output.with_name(f"{output.name}-fp16") for _ in recipes[1:])]
    for target in targets:
        refuse_target(target)
    made = []
    for recipe, target in zip(recipes, targets, strict=True):
        with _bars(target.name) as progress:
            made.append(make(folder, target, recipe, progress=progress))
    if as_json:
        print(json.dumps({"schema_version": 1, "packages": [_described(built) for built in made]}))
        return
    for built in made:
        _show_built(built)
    say(f"next: `selfdraft forge verify {targets[0]}` measures whether it is worth running here")


def _described(built: Built) -> dict[str, Any]:
    return {
        "folder": str(built.folder),
        "bytes": built.nbytes,
        "source_bytes": built.source_bytes,
        "head": built.head.describe() if built.head else None,
        "notes": list(built.notes),
    }


def _show_built(built: Built) -> None:
    rows = [("package", str(built.folder)), ("size", f"{gigabytes(built.nbytes)} of {gigabytes(built.source_bytes)}")]
    rows += [("note", note) for note in built.notes]
    if built.head:
        rows.append(("head", f"{built.head.kept} is kept"))
    show_rows(rows)
    if built.head:
        show_table(
            ("head", "size", "tokens a cycle", "over calibrated", "accepted at depth 1, 2, ..."), _ways(built.head)
        )


def _ways(head: HeadOutcome) -> list[tuple[str, ...]]:
    """What was measured of each way to store a head."""
    rows: list[tuple[str, ...]] = []
    for way, found in head.acceptance.items():
        more, error = head.over_calibrated(way)
        over = "" if way == "4bit" else f"{more:+.3f} (error {error:.3f})"
        shares = " ".join(f"{rate:.1%}" for rate in found.by_depth)
        rows.append((way, gigabytes(head.nbytes[way]), f"{found.tokens_per_cycle:.2f}", over, shares))
    return rows


@app.command("verify")
@command
def verify(
    folder: Verified,
    *,
    no_speed: Annotated[
        bool, flag("--no-speed", "Do not measure how fast each depth is, which takes minutes. Default: off.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure on this machine whether a package is worth running.

    Weights and logits are finite; the head is wired as it drafts best, by
    acceptance; drafting equals plain decoding; a depth beats it. The answer,
    yes or no, is stamped into selfdraft.json, with all that was measured.
    Exit code 1 if it is no.
    """
    _choose_blas()
    from ..forge.verify import verify as measure

    stamp = measure(_package(folder), speed=not no_speed, tell=dim)
    if as_json:
        print(json.dumps({"schema_version": 1, "folder": str(folder), **_stamped(stamp)}))
    else:
        _show_stamp(stamp)
    if stamp.verdict != "yes":
        raise typer.Exit(1)


def _stamped(stamp: Stamp) -> dict[str, Any]:
    names = ("verdict", "reasons", "depth_limit", "evidence", "head", "recipe", "source", "files")
    return {name: getattr(stamp, name) for name in names}


def _show_stamp(stamp: Stamp) -> None:
    found = stamp.evidence
    rows = [("verdict", stamp.verdict), *(("because", reason) for reason in stamp.reasons)]
    rows.append(("finite", "all weights" if found["finite"] else "NO"))
    if exact := found.get("exactness"):
        equal = ", ".join(f"{count} at depth {depth}" for depth, count in exact["equal_by_depth"].items())
        rows.append(("exactness", f"of {exact['prompts']} greedy answers, equal to plain decoding: {equal}"))
        apart = ", ".join(f"{width} tokens {difference:.2g}" for width, difference in exact["rows"].items())
        rows.append(("row parity", f"largest difference of logits to single tokens: {apart}"))
        if exact["largest_gap"] is not None:
            gap = f"between logits at most {exact['largest_gap']:.2g} apart, rounding explains {exact['rounding']:.2g}"
            rows.append(("parted", gap))
    for wiring, share in found.get("wiring", {}).items():
        rows.append(("wiring", f"{share:.1%} of its trunk's own tokens, {wiring}"))
    for candidate in found.get("speed", {}).get("candidates", ()):
        what = f"at depth {candidate['depth']}" if candidate["depth"] else "decoding plainly"
        rate = candidate["tokens_per_second"]["median"]
        rows.append(("speed", f"{rate:.1f} tokens a second {what}, {candidate['ratio']:.3g} of plain decoding"))
    if "speed" not in found:
        rows.append(("speed", "not measured"))
    if stamp.depth_limit is not None:
        rows.append(("depth limit", str(stamp.depth_limit)))
    show_rows(rows)


@app.command("publish")
@command
def publish(
    folder: Package,
    repository: Annotated[
        str, typer.Argument(metavar="ID", help="OWNER/NAME on the Hugging Face Hub.", show_default=False)
    ],
    *,
    public: Annotated[bool, flag("--public", "For all to see, if it is made now. Default: private.")] = False,
    dry_run: Annotated[bool, flag("--dry-run", "Write the card, upload nothing. Default: off.")] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a package that was verified, with a card of what was measured.

    One that was not verified, was changed since, or got a no is refused.
    """
    from ..forge.publish import publish as show

    done = show(_package(folder), repository, private=not public, dry_run=dry_run)
    report = {
        "schema_version": 1,
        "repository": done.repository,
        "address": done.address,
        "files": list(done.files),
        "bytes": done.nbytes,
    }
    if as_json:
        print(json.dumps(report))
    else:
        what = f"{len(done.files)} files, {gigabytes(done.nbytes)}"
        print(f"{what} are at {done.address}" if done.address else f"{what} would be uploaded to {done.repository}")


def _choose_blas() -> None:
    from ..device import choose_blas
    from ..settings import load_settings

    choose_blas(load_settings().blas)  # before MLX comes in


def _found(name: str) -> Path:
    from ..source import find_model

    return find_model(name)


def _package(folder: Path) -> Path:
    """A folder to write into; names that stand for one elsewhere are none."""
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is no folder; give that of the package", param_hint="FOLDER")
    return folder


@contextmanager
def _bars(name: str) -> Iterator[Any]:
    """Progress of one thing after the other, each with a bar of its own."""
    bars: dict[str, Bar] = {}

    def progress(what: str, done: int, total: int) -> None:
        if what not in bars:
            for bar in bars.values():
                bar.stop()
            bars[what] = Bar(f"{name}: {what}", _UNITS.get(what, "tokens"))
            bars[what].__enter__()
        bars[what](done, total)

    try:
        yield progress
    finally:
        for bar in bars.values():
            bar.stop()
