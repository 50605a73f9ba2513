"""Faults that only readers of the documentation would notice."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        "a flag has another name than its page says",
        "cli/flags.py",
        '        "--adapter-path",\n',
        '        "--adapter-folder",\n',
        "tests/docs/test_words.py -k adapters",
    ),
    Fault(
        "a command prints something else than its page shows",
        "cli/inspect.py",
        "; changed: ",
        "; altered: ",
        "tests/docs/test_commands.py -k adapters",
    ),
    Fault(
        "a command that a page has is gone",
        "cli/app.py",
        'app.command("stop")(control.stop)\n',
        "",
        "tests/docs/test_words.py -k server",
    ),
]
