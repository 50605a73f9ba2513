"""The entry point: commands, exit codes, and how an error looks.

Exit codes: 0 done, 1 an error of this package (one line on standard error), 2 wrong usage, 130 stopped by Ctrl-C,
141 the reader of standard output went away.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import platform
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from ..errors import SelfdraftError
from . import (
    bench,
    cache,
    chat,
    completions,
    connect,
    control,
    doctor,
    forge,
    inspect,
    models,
    pull,
    remove,
    run,
    serve,
    settings,
    start,
    tray,
    tune,
)
from .max import app as max_app
from .service import app as service_app
from .terminal import say

__all__ = ["app", "main"]

app = typer.Typer(
    name="selfdraft",
    help="Exact speculative decoding with a model's own multi-token-prediction head.",
    epilog="selfdraft COMMAND --help explains a command and each of its flags.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.command("start")(start.start)
app.command("run")(run.run)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("status")(control.status)
app.command("stop")(control.stop)
app.command("tray")(tray.tray)
app.command("connect")(connect.connect)
app.command("inspect")(inspect.inspect)
app.command("pull")(pull.pull)
app.command("models")(models.models)
app.command("remove")(remove.remove)
app.command("doctor")(doctor.doctor)
app.command("tune")(tune.tune)
app.command("bench")(bench.bench)
app.command("completions")(completions.completions)
app.add_typer(forge.app, name="forge")
app.add_typer(cache.app, name="cache")
app.add_typer(max_app, name="max")
app.add_typer(service_app, name="service")
app.add_typer(settings.app, name="settings")


def _show_version(wanted: bool) -> None:
    if wanted:
        parts = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-lm"))
        print(f"selfdraft {__version__}")
        print(f"{parts}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _open_closed_streams() -> None:
    """Give closed standard streams (`<&-`) a place to go, or the next file opened would become one of them."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. `arguments` defaults to those of the process."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not end an answer
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(args=arguments or ["--help"], prog_name="selfdraft", standalone_mode=False)
        return int(code or 0) if arguments else 2
    except SelfdraftError as error:
        say(str(error))
        return 1
    except OSError as error:
        say(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return 1
    except typer.TyperException as error:
        say(error.format_message().replace(": Value error, ", ": "))  # how typer says that a choice does not exist
        context = getattr(error, "ctx", None)
        print(f"Try '{context.command_path if context else 'selfdraft'} --help'.", file=sys.stderr)
        return error.exit_code
