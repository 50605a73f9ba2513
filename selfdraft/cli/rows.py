"""Answers that are tables, on standard output: for a terminal to look at, for a pipe to cut up."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .terminal import is_fancy, printable

__all__ = ["show_rows", "show_table"]


def show_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Labels and texts: a table that fits a terminal; in a pipe, a line each."""
    rows = [(label, printable(text)) for label, text in rows]
    if not is_fancy(sys.stdout):
        for label, text in rows:
            print(f"{label:<15}{text}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, Text(text))
    Console(highlight=False).print(table)


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns under headings, as wide as what stands in them."""
    rows = [[printable(text) for text in row] for row in rows]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
