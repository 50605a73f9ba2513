"""Guards the site: it builds strictly, with every page in its navigation; links lead somewhere in the repository."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.needs import lacking

from .pages import PAGES, ROOT, outside_blocks

MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"

_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the site is made of."""
    if not MKDOCS.exists():
        lacking("MkDocs is not installed: `make docs` does that")
    (tmp_path / "scripts").mkdir()
    for name in ("README.md", "mkdocs.yml", "scripts/site_hooks.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MKDOCS, "build", "--strict"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_it_builds_strictly(copy: Path) -> None:
    done = build(copy)
    assert done.returncode == 0, done.stderr
    first = (copy / "build" / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="server/"' in first  # the README's links are the site's
    assert "../" not in re.sub(r'"\.\./?"', "", first.partition("<body>")[2])
    assert all((copy / "build" / "site" / page.stem / "index.html").exists() for page in PAGES[1:])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[there](nowhere.md)", "nowhere.md"),
        ("[there](server.md#nowhere)", "nowhere"),
    ],
)
def test_a_link_that_leads_nowhere_is_an_error(line: str, said: str, copy: Path) -> None:
    (copy / "docs" / "doctor.md").write_text(f"# Doctor\n\n{line}\n")
    done = build(copy)
    assert done.returncode == 1
    assert said in done.stderr


def test_a_page_that_is_in_no_menu_is_an_error(copy: Path) -> None:
    (copy / "docs" / "stray.md").write_text("# Stray\n")
    assert "stray.md" in build(copy).stderr


def targets(page: Path) -> Iterator[str]:
    for found in _LINK.finditer(outside_blocks(page)):
        if not re.match(r"https?:|mailto:", found["target"]):
            yield found["target"]


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as MkDocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", outside_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """To files of the repository, and to headings of their pages."""
    wrong = []
    for target in targets(page):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(target)
    assert not wrong
