"""`selfdraft bench`: how fast a model is here, as a table, a JSON file and a picture."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import SelfdraftError
from .command import command
from .flags import AdapterPath, flag
from .terminal import dim, is_fancy, say

if TYPE_CHECKING:
    from ..settings import Settings
    from ..tuning.subject import Subject

__all__ = ["bench"]

_RESULTS = Path("benchmarks") / "results"


@dataclass(frozen=True, kw_only=True)
class SubjectFlags:
    """What is measured, beside a model."""

    synthetic: Annotated[
        Literal["27b", "9b", "tiny"] | None,
        flag(
            "--synthetic",
            "In place of MODEL: a model of real shape with random 4-bit weights and planted acceptance: 27b (16 GB), "
            "9b (5 GB) or tiny. Default: none.",
            metavar="SHAPE",
        ),
    ] = None
    adapter_path: AdapterPath = None

    def check(self, model: str | None) -> None:
        """Raises typer.BadParameter for what does not go together."""
        if self.synthetic is not None and model is not None:
            raise typer.BadParameter("goes without MODEL: it makes one", param_hint="'--synthetic'")
        if self.synthetic is not None and self.adapter_path is not None:
            raise typer.BadParameter("goes without --synthetic: none is made for it", param_hint="'--adapter-path'")


@command
def bench(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="'reference' (bundled), a local folder, or a Hugging Face id. Default: reference.",
            show_default=False,
        ),
    ] = None,
    *,
    what: SubjectFlags,
    quick: Annotated[
        bool, flag("--quick", "Less of everything, in under a minute for a small model. Default: off.")
    ] = False,
    output: Annotated[
        Path | None,
        flag(
            "--output",
            "Folder for the JSON file and the picture. Default: benchmarks/results inside a checkout, else the "
            "current folder.",
            metavar="FOLDER",
        ),
    ] = None,
    gguf: Annotated[
        Path | None,
        flag(
            "--gguf",
            "The model as a GGUF file with its MTP head, for llama.cpp. Default: the one in the model's folder or "
            "beside it.",
            metavar="FILE",
        ),
    ] = None,
    as_json: Annotated[
        bool, flag("--json", "Print the report as one JSON object, with a schema_version. Default: off.")
    ] = False,
) -> None:
    """Measure how fast a model is on this machine.

    Decoding plainly, at several depths, by stock mlx-lm and, where they are
    installed, with the drafters of mlx-vlm and llama.cpp, in turn; prompts
    and contexts of growing length; verify passes by width; on a GPU kernels
    against the speed of a copy; with an adapter, what it does to
    acceptance. Writes a JSON file and an SVG picture.
    Figures of a synthetic model are labelled SYNTHETIC.
    """
    what.check(model)
    if gguf is not None and not gguf.expanduser().is_file():
        raise SelfdraftError(f"{gguf} is not a file; give a GGUF file with --gguf")
    folder = _writable(output)  # said before minutes of measuring, not after
    from ..settings import load_settings

    settings = load_settings(session_cache_max_bytes=0, adapter_path=what.adapter_path)  # no warm prefixes
    if what.synthetic:
        subject, without = _synthetic(what.synthetic, settings), None
    else:
        without = _drafting_without(model or "reference", settings, quick) if settings.adapter_path else None
        subject = _loaded(model or "reference", settings)
    _keep(_measured(subject, quick, gguf, without), folder, as_json)


def _measured(subject: Subject, quick: bool, gguf: Path | None, without: dict[str, Any] | None) -> dict[str, Any]:
    """The report."""
    from ..tuning.bench import QUICK, USUAL
    from ..tuning.bench import bench as measure

    tell = dim if is_fancy(sys.stderr) else lambda line: None
    return measure(subject, QUICK if quick else USUAL, tell, gguf.expanduser() if gguf else None, without)


def _drafting_without(model: str, settings: Settings, quick: bool) -> dict[str, Any] | None:
    """How the model drafts without its adapter. It is given back before the other is loaded: one at a time."""
    subject = _loaded(model, settings.model_copy(update={"adapter_path": None}))
    from ..tuning.adapter_effect import drafting
    from ..tuning.bench import QUICK, USUAL

    extent = QUICK if quick else USUAL
    return drafting(subject, extent.prompts, extent.tokens)


def _keep(report: dict[str, Any], folder: Path, as_json: bool) -> None:
    """Write the report and its picture, and print it."""
    from ..files import write_atomically
    from ..tuning.bench import drawn, table

    path = folder / f"{_stem(report)}.json"
    picture = path.with_suffix(".svg")
    write_atomically(path, json.dumps(report, indent=1) + "\n")
    write_atomically(picture, drawn(report))
    print(json.dumps({**report, "files": [str(path), str(picture)]}) if as_json else "\n".join(table(report)))
    say(f"written: {path} and {picture}")


def _writable(output: Path | None) -> Path:
    """The folder to write into; made if it is not there."""
    checkout = Path("pyproject.toml").is_file() and _RESULTS.is_dir()
    folder = output.expanduser() if output else _RESULTS if checkout else Path()
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise SelfdraftError(f"{folder} cannot be written into; give another folder with --output")
    return folder


def _synthetic(shape: str, settings: Settings) -> Subject:
    from ..device import choose_blas

    choose_blas(settings.blas)  # before MLX comes in
    from ..tuning.subject import planted

    return planted(shape, settings)


def _loaded(model: str, settings: Settings) -> Subject:
    from ..loading import load
    from .session import loading_bar

    with loading_bar(model) as bar:
        llm = load(model, settings=settings, progress=bar)
    for note in llm.notes:
        say(note)
    from ..tuning.subject import loaded

    return loaded(llm)


def _stem(report: dict[str, Any]) -> str:
    """Name of the files: of the model, the device and the dtype."""
    name = Path(report["model"]).name or "model"
    return re.sub(r"[^\w.-]+", "-", f"bench_{name}_{report['device']}_{report['dtype']}")
