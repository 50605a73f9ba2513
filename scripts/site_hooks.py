"""What the site of the documentation has beyond the files in docs/: the README as its first page; called by MkDocs.

Files of the repository that are no pages are named, not linked to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README, its links as they are from within docs/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=re.sub(r"\]\((?!http|#)", "](../", text)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links between pages stay links."""
    markdown = markdown.replace("](../docs/", "](").replace("](../README.md", "](index.md")
    return _LINK.sub(lambda link: link["text"] if link["target"].startswith("../") else link[0], markdown)
