"""Builds the sdist, and the wheel from it, and checks both.

Dates in them are that of the last commit that changed what they hold, so that the same sources and tools
(packaging/requirements.txt) give the same bytes.

    usage: dist.py [FOLDER]      where to; default: dist
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from archives import ROOT, SOURCES, expected_sdist, expected_wheel, problems

SUMS = "SHA256SUMS"


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist")
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("selfdraft-*"), *folder.glob(SUMS)]:
        old.unlink()
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct", "--", *SOURCES)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        env={**os.environ, "SOURCE_DATE_EPOCH": epoch},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    found = problems(wheel, expected_wheel()) + problems(sdist, expected_sdist())
    for line in found:
        print(line, file=sys.stderr)
    subprocess.run([sys.executable, "-m", "twine", "--no-color", "check", "--strict", wheel, sdist], check=True)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in (sdist, wheel)]
    (folder / SUMS).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return 1 if found else 0


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
