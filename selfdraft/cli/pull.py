"""`selfdraft pull`: a model from the Hugging Face Hub, verified and pinned. Says what will run before anything runs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import CheckpointError, ModelNotFound
from .command import command
from .flags import flag
from .found_models import FoundModel, described, gigabytes
from .rows import show_rows, show_table
from .terminal import Bar, is_fancy, say

if TYPE_CHECKING:
    from ..hub.listing import RemoteFile
    from ..hub.pull import Plan

__all__ = ["pull"]


@command
def pull(
    model: Annotated[str, typer.Argument(metavar="ID", help="OWNER/NAME or OWNER/NAME@REVISION.", show_default=False)],
    *,
    dry_run: Annotated[
        bool, flag("--dry-run", "Only say what would be fetched, and whether it fits. Default: off.")
    ] = False,
    as_json: Annotated[bool, flag("--json", "Print one JSON object, with a schema_version. Default: off.")] = False,
) -> None:
    """Fetch a model from the Hugging Face Hub and pin it.

    Every file is verified against the hashes that the Hub lists, those that
    were there before too; what is damaged is fetched again. A pull that was
    interrupted goes on where it ended. The name then stands for this commit,
    and loading it needs no network, until it is pulled again.
    """
    from ..device import choose_blas
    from ..hub.listing import list_files
    from ..hub.names import parse
    from ..hub.pull import plan
    from ..retrieval import reads_texts
    from ..settings import load_settings

    wanted = parse(model)
    if wanted is None:
        raise ModelNotFound(f"{model!r} is no id on the Hugging Face Hub: write OWNER/NAME or OWNER/NAME@REVISION")
    settings = load_settings()
    choose_blas(settings.blas)  # before MLX comes in
    planned = plan(list_files(wanted))
    say(f"{wanted} is at commit {planned.listing.commit}: {_amount(planned)}")
    report = {
        "schema_version": 1,
        "model": str(wanted),
        "commit": planned.listing.commit,
        "folder": str(planned.listing.folder),
        "bytes": planned.listing.bytes,
        "missing_bytes": planned.missing,
        "free_bytes": planned.free,
        "fits_disk": planned.fits,
        "files": [dataclasses.asdict(file) for file in planned.listing.files],
    }
    rows: list[tuple[str, str]] = []
    if not dry_run:
        _fetch(planned)
        found = described(wanted.repository, planned.listing.folder, settings, "pulled", planned.listing.commit)
        if found.problem and reads_texts(found.folder):
            served = f"selfdraft serve --embedding-model {wanted.repository}, or --rerank-model"
            found = dataclasses.replace(found, problem=f"writes no text, but embeds or ranks: {served}")
        more, rows = _what_runs(found)
        report |= more
    if as_json:
        print(json.dumps(report))
    elif dry_run:
        show_table(("file", "size"), [(file.name, gigabytes(file.size)) for file in planned.listing.files])
        say(f"{gigabytes(planned.free)} are free: {'it fits' if planned.fits else 'TOO BIG'}; nothing is fetched")
    else:
        show_rows(rows)


def _amount(planned: Plan) -> str:
    whole = f"{len(planned.listing.files)} files, {gigabytes(planned.listing.bytes)}"
    return f"{whole}, {gigabytes(planned.missing)} of it to fetch" if planned.missing else f"{whole}, all of it here"


def _fetch(planned: Plan) -> None:
    """Pull, and tell how it goes: on a terminal by a bar, else by lines."""
    from ..hub.pull import Watch, pull
    from ..models.checkpoint import Companion, accept, classify
    from ..retrieval import plan as look
    from ..retrieval import reads_texts

    name = planned.listing.model
    with Bar(f"pulling {name}", "bytes") as bar:
        tenths = _Tenths()

        def progress(done: int, total: int) -> None:
            bar(done, total)
            tenths(done, total)

        def damaged(file: RemoteFile) -> None:
            say(f"{file.name} is not what the Hub lists: removed, and fetched again")

        def judge(folder: Path, files: Sequence[str]) -> None:
            try:
                accept(folder, files)
            except Companion:  # which is fetched for the model that it belongs to
                return
            except CheckpointError:
                if not reads_texts(folder):
                    raise

        def examine(folder: Path) -> None:
            if reads_texts(folder):
                look(folder)
                return
            with suppress(Companion):
                classify(folder)

        try:
            pull(planned, Watch(progress, damaged), accept=judge, examine=examine)
        except KeyboardInterrupt:
            bar.stop()
            say(f"stopped; what was fetched stays, and `selfdraft pull {name}` goes on from there")
            raise typer.Exit(130) from None


class _Tenths:
    """A line for each tenth that is done, where there is no terminal."""

    def __init__(self) -> None:
        self._said = 0

    def __call__(self, done: int, total: int) -> None:
        tenths = 10 * done // max(total, 1)
        if tenths > self._said and not is_fancy(sys.stderr):
            self._said = tenths
            say(f"{10 * tenths} %: {gigabytes(done)} of {gigabytes(total)}")


def _what_runs(found: FoundModel) -> tuple[dict[str, object], list[tuple[str, str]]]:
    """What to expect of a model that was pulled: for machines and for people."""
    from ..memory import free_memory
    from ..models.checkpoint import classify
    from .inspect import depth_limit, runs

    pinned = ("model", f"{found.name}, pinned to {found.commit}")
    size = ("size", f"{gigabytes(found.disk)}, every file verified")
    if found.problem:  # a head alone: all else was refused
        return {"pinned": True, "problem": found.problem}, [
            pinned,
            ("folder", str(found.folder)),
            size,
            ("note", found.problem),
        ]
    checkpoint = classify(found.folder)
    depth, free = depth_limit(checkpoint), free_memory()
    head = f"none that can be used: {found.head}" if found.head else "usable"
    if not found.head and checkpoint.head.source == "separate":
        head = "in a file of its own; every load probes whether it belongs to this model"
    fits = found.memory <= free
    report = {
        "pinned": True,
        "head": {"usable": not found.head, "reason": found.head},
        "max_depth": depth,
        "memory_bytes": found.memory,
        "free_memory_bytes": free,
        "fits_memory": fits,
    }
    rows = [
        pinned,
        ("folder", str(found.folder)),
        size,
        ("MTP head", head),
        ("depth limit", str(depth)),
        ("memory", f"{'fits' if fits else 'TOO BIG'}: needs {gigabytes(found.memory)} of {gigabytes(free)} free"),
        ("will run", runs(depth, found.head)),
    ]
    return report, rows
