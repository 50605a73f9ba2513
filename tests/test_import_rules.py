"""Guards the arrows of docs/architecture.md: a package imports only what stands below it, and nothing heavy early."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import selfdraft

PACKAGE = Path(selfdraft.__file__).parent

# What each part may import of this project. A part that is missing here fails the test: decide where it stands.
ALLOWED = {
    "errors": set(),
    "params": {"errors"},
    "results": set(),
    "device": {"errors"},
    "files": set(),
    "hub": {"errors", "files"},
    "images": {"errors"},
    "catalogue": set(),
    "fans": {"errors", "files"},
    "settings_file": {"errors", "files"},
    "settings": {"device", "errors", "fans", "settings_file"},
    "settings_list": {"errors", "settings"},
    "kernels": set(),
    "state": {"kernels"},
    "models": {"errors", "kernels", "state"},
    "engine": {"errors", "kernels", "models", "params", "results", "state"},
    "text": {"errors"},
    "retrieval": {"errors", "memory", "models"},
    "sessions": {"engine", "errors", "files", "state"},
    "stamp": {"errors", "files"},
    "distributed": {"__init__", "engine", "errors", "memory", "models", "sessions", "settings", "state"},
    "forge": {
        "device",
        "engine",
        "errors",
        "files",
        "llm",
        "memory",
        "models",
        "params",
        "settings",
        "stamp",
        "text",
        "tuning",
    },
    "memory": {"errors"},
    "budget": {"engine", "errors", "memory"},
    "tuned": {"engine", "errors", "files"},
    "tuning": {
        "device",
        "engine",
        "errors",
        "files",
        "kernels",
        "llm",
        "loading",
        "models",
        "params",
        "results",
        "settings",
        "state",
        "tuned",
    },
    "keeping": {"kernels", "llm", "sessions"},
    "prompts": {"errors", "images", "sessions", "text", "vision"},
    "vision": {"errors", "images", "models", "text"},
    "opening": {
        "device",
        "distributed",
        "engine",
        "errors",
        "memory",
        "models",
        "params",
        "sessions",
        "settings",
        "stamp",
        "text",
        "vision",
    },
    "llm": {
        "budget",
        "device",
        "distributed",
        "engine",
        "errors",
        "fans",
        "kernels",
        "memory",
        "models",
        "opening",
        "params",
        "prompts",
        "results",
        "sessions",
        "settings",
        "stream",
        "text",
        "tuned",
    },
    "stream": {"engine", "results", "text"},
    "loading": {"device", "distributed", "errors", "fans", "llm", "memory", "settings", "source"},
    "source": {"errors", "hub", "models"},
    "assets": set(),
    "server": {
        "__init__",
        "budget",
        "engine",
        "errors",
        "files",
        "images",
        "keeping",
        "llm",
        "memory",
        "models",
        "params",
        "prompts",
        "results",
        "retrieval",
        "sessions",
        "settings",
        "source",
        "stream",
        "text",
    },
    "daemon": {"errors", "files"},
    "tray": {"errors", "fans", "server", "settings"},
    "doctor": {
        "__init__",
        "device",
        "errors",
        "fans",
        "hub",
        "kernels",
        "memory",
        "models",
        "server",
        "sessions",
        "settings",
        "settings_file",
        "settings_list",
        "source",
        "state",
    },
    "cli": {
        "device",
        "distributed",
        "doctor",
        "engine",
        "errors",
        "catalogue",
        "daemon",
        "fans",
        "files",
        "forge",
        "hub",
        "images",
        "keeping",
        "llm",
        "loading",
        "memory",
        "models",
        "opening",
        "params",
        "prompts",
        "results",
        "retrieval",
        "server",
        "sessions",
        "settings",
        "settings_list",
        "source",
        "stamp",
        "text",
        "tray",
        "tuned",
        "tuning",
        "vision",
        "__init__",
    },
    "__init__": {"device", "errors", "llm", "loading", "params", "results", "settings"},
    "__main__": {"cli"},
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The package, or the top-level module, a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """Parts of this project a file imports, also inside functions."""
    found = set()
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {name.split(".")[0] for name in names if name}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "selfdraft":
            rest = (node.module or "").split(".")[1:]
            found |= {rest[0]} if rest else {"__init__"}
    return {name if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists() else "__init__" for name in found}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    assert part in ALLOWED, f"{part} has no place in the import rules"
    forbidden = imported_parts(path) - ALLOWED[part] - {part}
    assert not forbidden, f"{path.relative_to(PACKAGE)} may not import {sorted(forbidden)}"


@pytest.mark.parametrize("part", ["engine", "models", "state", "kernels"])
def test_the_core_knows_no_text_and_no_terminal(part: str) -> None:
    banned = {"tokenizers", "jinja2", "transformers", "rich", "typer", "prompt_toolkit", "fastapi"}
    for path in (PACKAGE / part).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(node.module or "")
            assert not banned & {name.split(".")[0] for name in names}, path


@pytest.mark.parametrize(
    "statement",
    [
        "import selfdraft",
        "from selfdraft import load, SamplingParams",
        "import selfdraft.cli.app",
        "from selfdraft.server.config import load_server_settings",
        "import selfdraft.server.instance, selfdraft.source, selfdraft.cli.serve, selfdraft.cli.start",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(statement: str) -> None:
    """`load` must be able to choose the BLAS, and `--help` must be quick."""
    probe = f"{statement}; import sys; print([n for n in ('mlx.core', 'transformers', 'mlx_lm') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_and_functions_stay_small() -> None:
    """A file past 500 lines, or a function past 60, is a sign that two things live in it."""
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 500, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno <= 60, f"{path}: {node.name}"
