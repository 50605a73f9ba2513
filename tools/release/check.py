"""Goes through what docs/release.md asks before an upload, as far as a program can tell. Changes nothing.

Exit code 1 if anything is missing; each line says what, and what to do.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from archives import ROOT, version_of
from formula import FORMULA, address
from locks import TARGETS, Target, pins
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DIST = ROOT / "dist"
TOOLS = Path(__file__).resolve().parent
_RELEASED = re.compile(r"^## (\S+) \((\d{4}-\d\d-\d\d|unreleased)\)$", re.MULTILINE)
_RESOURCE = re.compile(r'resource "([^"]+)" do\s+url "([^"]+)", using: :nounzip\s+sha256 "([0-9a-f]{64})"')


def tree() -> Iterator[str]:
    """Everything is committed."""
    if changed := _git("status", "--porcelain"):
        yield f"not committed: {', '.join(line[3:] for line in changed.splitlines()[:5])}"


def version() -> Iterator[str]:
    """The version is plain, and the changelog begins with it and a date."""
    stated = version_of()
    if not re.fullmatch(r"\d+\.\d+\.\d+", stated):
        yield f"selfdraft/__init__.py states {stated!r}: write it as 1.2.3"
    first = _RELEASED.search((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if first is None or first[1] != stated:
        yield f"CHANGELOG.md begins with {first[1] if first else 'no version'}, not with {stated}"
    elif first[2] == "unreleased":
        yield f"CHANGELOG.md calls {stated} unreleased: give it its date"


def tag() -> Iterator[str]:
    """No other commit has the version's tag."""
    name = f"v{version_of()}"
    if _git("tag", "--list", name) and _git("rev-parse", f"{name}^{{commit}}") != _git("rev-parse", "HEAD"):
        yield f"{name} is another commit: raise the version in selfdraft/__init__.py"


def share() -> Iterator[str]:
    """The man page and completions are of this command line."""
    python = ROOT / ".venv" / "bin" / "python"  # it has what the command line imports
    done = subprocess.run([python, TOOLS / "share.py", "--check"], capture_output=True, text=True, check=False)
    if done.returncode:
        yield from done.stdout.splitlines() or [done.stderr.strip()]


def locks() -> Iterator[str]:
    """Every dependency that pyproject.toml names is locked, at a version that it allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for target in TARGETS:
        locked = pins(target.lock.read_text(encoding="utf-8"))
        extra = project["optional-dependencies"][target.extra] if target.extra else []
        for requirement in map(Requirement, [*project["dependencies"], *extra]):
            pin = locked.get(canonicalize_name(requirement.name))
            if pin is None or not requirement.specifier.contains(pin.version):
                yield f"{target.lock.name} does not have {requirement}: run `make locks`"


def archives() -> Iterator[str]:
    """dist/ holds the wheel and the sdist that this commit gives."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, TOOLS / "dist.py", folder], capture_output=True, text=True, check=False)
        if done.returncode:
            yield done.stderr.strip()
            return
        yield from _unlike(Path(folder), "make dist")


def bills() -> Iterator[str]:
    """dist/ holds the bills of materials, and every licence is allowed."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, TOOLS / "sbom.py", folder], capture_output=True, text=True, check=False)
        if done.returncode:
            yield from done.stderr.splitlines()
            return
        yield from _unlike(Path(folder), "make sbom")


def formula() -> Iterator[str]:
    """The Homebrew formula is of the wheel in dist/ and of the macOS lock."""
    text = FORMULA.read_text(encoding="utf-8")
    for wheel in DIST.glob("*.whl"):
        if f'url "{address(wheel)}"' not in text or f'version "{version_of()}"' not in text:
            yield "the formula is of another wheel: run `make formula`, and commit it"
    (target,) = [target for target in TARGETS if target.name == "macos-arm64"]
    yield from _resources(text, target)


def _resources(text: str, target: Target) -> Iterator[str]:
    locked = pins(target.lock.read_text(encoding="utf-8"))
    found = {name: sha256 for name, _, sha256 in _RESOURCE.findall(text)}
    for name in sorted(locked.keys() | found.keys()):
        if name not in locked or found.get(name) not in locked[name].hashes:
            yield f"the formula's {name} is not that of {target.lock.name}: run `make formula`"


def _unlike(wanted: Path, command: str) -> Iterator[str]:
    """Files of a folder that dist/ lacks or holds otherwise."""
    for path in sorted(wanted.iterdir()):
        there = DIST / path.name
        if not there.is_file() or there.read_bytes() != path.read_bytes():
            yield f"dist/{path.name} is not what this commit gives: run `{command}`"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


CHECKS: tuple[Callable[[], Iterator[str]], ...] = (tree, version, tag, share, locks, archives, bills, formula)


def main() -> int:
    failed = 0
    for check in CHECKS:
        found = list(check())
        failed += bool(found)
        print(f"{'no' if found else 'ok'}  {check.__doc__}", *(f"      {line}" for line in found), sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
