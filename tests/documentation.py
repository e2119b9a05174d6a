"""The documents as data: pages, their code blocks and links; and the table of options in them.

Every fenced block has a language, and one of these titles or none:

    title="model_repository/net/1/model.py"       the file that the block is
    title="prints"                                what the command or code before it prints
    title="Example: requires Docker"              an example that the tests do not run, and why
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from torch_py_backend.config.options import TABLE, OptionRow, yes_no

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OPTIONS = DOCS / "options.md"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")))
PRINTS = "prints"
_NOT_RUN = "Example: "
_INFO = re.compile(r'(\w+)(?: title="([^"]+)")?')
_MARKDOWN = MarkdownIt().enable("table")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        place: page and line, for messages.
        language: as the fence says; empty where it says none, or nothing that can be read.
        title: as the fence says.
        text: what is in it.
    """

    place: str
    language: str
    title: str
    text: str

    @property
    def reason(self) -> str:
        """Return why the tests do not run the block; empty if they do."""
        return self.title.removeprefix(_NOT_RUN) if self.title.startswith(_NOT_RUN) else ""

    @property
    def file(self) -> str:
        """The file that it is; empty where it is none."""
        return "" if self.reason or self.title == PRINTS else self.title

    @property
    def runs(self) -> bool:
        """Whether it is code to be executed."""
        return self.language in ("python", "sh") and not self.title


def blocks(page: Path) -> list[Block]:
    """The page's blocks of code, those without a fence included."""
    found = []
    for token in _MARKDOWN.parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            info = _INFO.fullmatch(token.info.strip())
            language, title = (info[1], info[2] or "") if info else ("", "")
            line = (token.map or [0])[0] + 1
            found.append(Block(f"{page.name}:{line}", language, title, token.content))
    return found


def links(page: Path) -> Iterator[str]:
    """Where the page leads."""
    for token in _MARKDOWN.parse(page.read_text(encoding="utf-8")):
        for child in token.children or ():
            if child.type in ("link_open", "image"):
                yield str(child.attrs.get("href") or child.attrs.get("src"))


def anchors(page: Path) -> set[str]:
    """What can be linked to within the page: its headings, and elements with an id."""
    text = page.read_text(encoding="utf-8")
    tokens = _MARKDOWN.parse(text)
    headings = [
        after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open"
    ]
    return {_slug(heading) for heading in headings} | set(re.findall(r'<a id="([^"]+)"', text))


def _slug(heading: str) -> str:
    """A heading's anchor, as GitHub and MkDocs make it."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


# --- the table of options --------------------------------------------------------------------


def table() -> str:
    """The table of parameters, as the code has it."""
    rows = ["| parameter | value | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, TABLE)])


_TABLE = re.compile(r"(<!-- options:[^\n]*-->\n)(.*?)(<!-- end of options -->)", flags=re.DOTALL)


def table_in_page() -> str:
    match = _TABLE.search(OPTIONS.read_text(encoding="utf-8"))
    assert match is not None
    return match[2].strip()


def _row(row: OptionRow) -> str:
    keys = ", ".join(f"`{key}`" for key in (row.key, *row.also))
    defaults: dict[object, str] = {None: "unset", (): "`none`"}
    default = defaults.get(row.default, f"`{str(row.default).lower()}`")
    if row.parser is yes_no:
        default = "`yes`" if row.default else "`no`"
    anchor = f'<a id="{row.key.lower()}"></a>'
    return f"| {anchor}{keys} | {row.parser.accepted} | {default} | {row.doc} |"


if __name__ == "__main__":
    # python tests/documentation.py: write the table into the page.
    written = OPTIONS.read_text(encoding="utf-8")
    OPTIONS.write_text(
        _TABLE.sub(lambda old: f"{old[1]}{table()}\n{old[3]}", written), encoding="utf-8"
    )
