"""MkDocs hooks: add README.md, CONTRIBUTING.md and CHANGELOG.md to the site."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]
_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_FROM_BESIDE = re.compile(r"\]\(docs/")
_TO_BESIDE = re.compile(rf"\]\((?:\.\./)?({'|'.join(map(re.escape, _PAGES))})")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/."""
    for source, page in _PAGES.items():
        text = (_ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_FROM_BESIDE.sub("](", text)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001  MkDocs gives them by name
    """Rewrite links, which are valid on GitHub, for the site."""
    return _TO_BESIDE.sub(lambda link: f"]({_PAGES[link[1]]}", markdown)
