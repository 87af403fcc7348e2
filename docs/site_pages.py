"""A hook of mkdocs (`mkdocs.yml`): the repository's own pages are part of the site, README.md as its
first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md"} | {
    name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of docs/."""
    for page, name in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links from docs/ to them, which are beside it on the site."""
    return markdown.replace("](../README.md", "](index.md").replace("](../", "](")
