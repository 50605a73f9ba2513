"""`selfdraft tune`: find out which depth pays here, and keep it for `depth=auto`. Measures in other processes."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .command import command
from .flags import AdapterPath, flag, number, whole
from .terminal import dim, is_fancy, say

if TYPE_CHECKING:
    from ..tuning.tune import Tuning

__all__ = ["tune"]


@dataclass(frozen=True, kw_only=True)
class TuneFlags:
    """How much is measured."""

    max_depth: Annotated[
        int | None,
        flag("--max-depth", "Deepest draft to try, 1 or more. Default: what the head allows.", None, "N", whole),
    ] = None
    rounds: Annotated[
        int, flag("--rounds", "Runs of each depth, 3 or more; an even number is fairer. Default: 4.", None, "N", whole)
    ] = 4
    tokens: Annotated[
        int, flag("--tokens", "Tokens decoded of each of four prompts, 8 or more. Default: 64.", None, "N", whole)
    ] = 64
    pause: Annotated[
        float,
        flag("--pause", "Seconds before each run, for the machine to settle. Default: 1.", None, "SECONDS", number),
    ] = 1.0

    def check(self) -> None:
        """Raises typer.BadParameter for a value out of range."""
        for name, value, least in (
            ("max-depth", self.max_depth, 1),
            ("rounds", self.rounds, 3),
            ("tokens", self.tokens, 8),
        ):
            if value is not None and value < least:
                raise typer.BadParameter(f"must be at least {least}, not {value}", param_hint=f"'--{name}'")
        if not 0 <= self.pause <= 600:
            raise typer.BadParameter(f"must lie in [0, 600], not {self.pause:g}", param_hint="'--pause'")


@command
def tune(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="'reference' (bundled), a local folder, or a Hugging Face id. Default: reference.",
            show_default=False,
        ),
    ] = "reference",
    *,
    extent: TuneFlags,
    adapter_path: AdapterPath = None,
    forget: Annotated[
        bool, flag("--forget", "Measure nothing: delete what is kept of this model. Default: off.")
    ] = False,
    as_json: Annotated[
        bool, flag("--json", "Print everything as one JSON object, with a schema_version. Default: off.")
    ] = False,
) -> None:
    """Measure which depth pays on this machine, and keep it.

    Plain decoding and every depth decode the same prompts, greedily, each
    run in a process of its own, in alternating order. A depth is kept only
    if it beats plain decoding by more than the spread of the runs. --depth
    auto then begins with it, for this build of the model, this adapter,
    this version of MLX and the device, dtype and BLAS of now.
    """
    extent.check()
    from ..source import find_model

    folder = find_model(model)  # a wrong name is said before anything is started
    if forget:
        _forget(folder, as_json)
        return
    from ..tuned import store
    from ..tuning import tune as tuning

    found = tuning.describe(model, adapter_path)
    done = tuning.tune(
        model,
        found,
        adapter=adapter_path,
        max_depth=extent.max_depth or found["max_depth"],
        rounds=extent.rounds,
        tokens=extent.tokens,
        pause=extent.pause,
        tell=dim if is_fancy(sys.stderr) else lambda line: None,
    )
    if not as_json:
        _show(done)  # before it is kept: where that fails, minutes of measuring are not lost
    path = store(found["belongs_to"], done.start, report=done.report())
    if as_json:
        print(json.dumps({**done.report(), "stored": str(path)}))
    else:
        say(f"kept in {path}")


def _forget(folder: Path, as_json: bool) -> None:
    from ..tuned import forget

    count = forget(folder)
    if as_json:
        print(json.dumps({"schema_version": 1, "forgotten": count}))
    else:
        print(f"{count} record{'' if count == 1 else 's'} deleted" if count else "nothing was kept of this model")


def _show(done: Tuning) -> None:
    plain = done.candidates[0]
    print(f"{'':<10}{'tok/s':>8}  {'quartiles':<16}{'ratio':>6}{'tok/cycle':>11}{'ms/cycle':>10}")
    for candidate in done.candidates:
        rates, total = candidate.rates, candidate.total
        print(
            f"{f'depth {candidate.depth}' if candidate.depth else 'plain':<10}{rates.median:>8.1f}  "
            f"{f'{rates.low:.1f}-{rates.high:.1f}':<16}{rates.median / plain.rates.median:>6.2f}"
            f"{total.tokens / total.cycles:>11.2f}{candidate.cycle_seconds * 1e3:>10.2f}"
        )
    print(done.verdict)
