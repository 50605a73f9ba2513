"""Writes what the wheel puts under share/: the man page and the completions, of the command line as it is.

usage: share.py [--check]      with --check, only say whether they are as they should be
"""

from __future__ import annotations

import datetime
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARE = ROOT / "packaging" / "share"
COMPLETIONS = {
    "bash": "bash-completion/completions/selfdraft",
    "zsh": "zsh/site-functions/_selfdraft",
    "fish": "fish/vendor_completions.d/selfdraft.fish",
}
MAN = "man/man1/selfdraft.1"
_DATE = re.compile(r"(?<=^\.TH SELFDRAFT 1 )\d{4}-\d\d-\d\d", re.MULTILINE)


def main() -> int:
    for name in [name for name in os.environ if name.startswith("SELFDRAFT_")]:
        del os.environ[name]  # what is written must not depend on who writes it
    sys.path.insert(0, str(ROOT))
    stale = [path for path, text in _wanted() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what the command line says: run `make share`")
        return 1 if stale else 0
    for path, text in _wanted():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


def _wanted() -> Iterator[tuple[Path, str]]:
    from man_page import man_page

    from selfdraft.cli.completions import completion_script

    for shell, name in COMPLETIONS.items():
        yield SHARE / name, completion_script(shell)
    path = SHARE / MAN
    text = man_page(datetime.date.today().isoformat())
    yield path, _dated(text, path.read_text(encoding="utf-8") if path.is_file() else "")


def _dated(text: str, before: str) -> str:
    """The page, with its old date if nothing else changed."""
    return before if _DATE.sub("", text) == _DATE.sub("", before) else text


if __name__ == "__main__":
    sys.exit(main())
