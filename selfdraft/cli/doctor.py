"""`selfdraft doctor`: what is wrong here, and the fix."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .command import command
from .flags import flag
from .settings import kinds
from .terminal import is_fancy, say

if TYPE_CHECKING:
    from ..doctor.finding import Finding
    from ..doctor.report import Report

__all__ = ["doctor"]

_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


@command
def doctor(
    *,
    as_json: Annotated[bool, flag("--json", "Print one JSON object, with a schema_version. Default: off.")] = False,
    parity: Annotated[
        bool,
        flag(
            "--parity",
            "Measure whether rows that are decoded together have the bits of rows alone, by width and format; takes "
            "some seconds. Default: off.",
        ),
    ] = False,
    model: Annotated[
        str | None,
        flag("--model -m", "Look at a model, too; nothing is downloaded. Default: none.", metavar="NAME"),
    ] = None,
    bundle: Annotated[
        Path | None,
        flag(
            "--bundle",
            "Write the report to a zip file to pass on, without names, keys and texts. Default: none.",
            metavar="FILE",
        ),
    ] = None,
    log: Annotated[
        Path | None,
        flag("--log", "With --bundle: a log of serve, whose end goes with it. Default: none.", metavar="FILE"),
    ] = None,
) -> None:
    """Look for what is wrong with this installation.

    Each finding says what is there, what is expected and what to do. The
    exit code is 1 if something keeps Selfdraft from working, else 0.
    """
    from ..doctor.context import Context
    from ..doctor.report import examine

    if log is not None and bundle is None:
        raise typer.BadParameter("goes with --bundle", param_hint="'--log'")
    context = Context(kinds, model=model, parity=parity)
    report = examine(context)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        _show(report)
    if bundle is not None:
        from ..doctor.bundle import write_bundle

        files = write_bundle(bundle, report, context, log)
        say(f"{bundle} holds {' and '.join(files)}, redacted: look through them before you pass them on")
    if report.failed:
        raise typer.Exit(1)


def _show(report: Report) -> None:
    """On a terminal a table; in a pipe plain lines."""
    counts = ", ".join(f"{count} {status}" for status, count in report.counts.items())
    if is_fancy(sys.stdout):
        _table(report.findings)
        print(f"\n{counts}")
        return
    for each in report.findings:
        print(f"{each.status:<4}  {each.name}: {each.observed}")
        for label, text in _details(each):
            print(f"      {label}: {text}")
    for line in _matrix(report.findings):
        print(line)
    print(counts)


def _details(each: Finding) -> Iterable[tuple[str, str]]:
    """What goes with a finding that asks for something."""
    if each.status in ("warn", "fail"):
        yield "expected", each.expected
    if each.fix:
        yield "fix" if each.status in ("warn", "fail") else "hint", each.fix


def _matrix(findings: Iterable[Finding]) -> list[str]:
    """The parity matrix, if it was measured: formats by widths."""
    measured = [each for each in findings if "forward" in each.figures]
    if not measured:
        return []
    widths = range(1, len(measured[0].figures["forward"]) + 1)
    rows = [["largest difference at width", *map(str, widths)]]
    for each in measured:
        for what in ("product", "forward"):
            rows.append([f"{each.name.removeprefix('parity ')}, {what}", *(f"{x:.1g}" for x in each.figures[what])])
    first = max(len(row[0]) for row in rows)
    return ["", *(f"{row[0]:<{first}}" + "".join(f"{cell:>8}" for cell in row[1:]) for row in rows), ""]


def _table(findings: Iterable[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for each in findings:
        text = Text(each.observed, "dim" if each.status == "skip" else "")
        for label, detail in _details(each):
            text.append(f"\n{label}: ", "cyan").append(detail)
        table.add_row(Text(each.status, _STYLE[each.status]), each.name, text)
    console.print(table)
    console.print(Text("\n".join(_matrix(findings))))
