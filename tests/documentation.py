"""The documentation as data: pages and their code blocks; and the table of options.

`python tests/documentation.py` writes the table in docs/options.md.

Every fenced block has a language, and one of these titles or none:

    title="model_repository/net/1/model.py"       the file that the block is
    title="prints"                                the output of the block before it
    title="Example: requires Docker"              an example that the tests do not run, and why
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from torch_py_backend.config.options import Options, boolean, yes_no

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OPTIONS = DOCS / "options.md"
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "deploy" / "README.md",
    *sorted(DOCS.glob("*.md")),
)
PRINTS = "prints"
_NOT_RUN = "Example: "
_INFO = re.compile(r'(\w+)(?: title="([^"]+)")?')
_MARKDOWN = MarkdownIt().enable("table")


@dataclass(frozen=True)
class Block:
    """A block of code; `place` is its page and line, `language` is empty if the fence has none."""

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
        """Return the path of the file that the block is; empty for other blocks."""
        return "" if self.reason or self.title == PRINTS else self.title

    @property
    def runs(self) -> bool:
        return self.language in ("python", "sh") and not self.title


def blocks(page: Path) -> list[Block]:
    result = []
    for token in _MARKDOWN.parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            info = _INFO.fullmatch(token.info.strip())
            language, title = (info[1], info[2] or "") if info else ("", "")
            line = (token.map or [0])[0] + 1
            result.append(Block(f"{page.name}:{line}", language, title, token.content))
    return result


def generated(page: Path, name: str, new: str | None = None) -> str:
    """Return the table between two comments of a page; write a new one there, if it is given."""
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"<!-- {name}:.*? -->\n(.*?)\n<!-- end of {name} -->", text, re.DOTALL)
    assert found is not None
    if new is not None:
        page.write_text(text[: found.start(1)] + new + text[found.end(1) :], encoding="utf-8")
    return found[1]


def table() -> str:
    """Return the table of options: the code's options, with their meanings in the page."""
    old = generated(OPTIONS, "options")
    meanings = dict(re.findall(r'^\| <a id="(\w+)">.* \| (.+) \|$', old, re.MULTILINE))
    rows = [_row(row) + meanings.get(row.name, "") + " |" for row in dataclasses.fields(Options)]
    return "\n".join(["| option | value | default | meaning |", "|---|---|---|---|", *rows])


def _row(row: dataclasses.Field[Any]) -> str:
    parser, aliases = row.metadata["parser"], row.metadata["aliases"]
    keys = ", ".join(f"`{key}`" for key in (row.name.upper(), *aliases))
    defaults: dict[object, str] = {None: "unset", (): "`none`"}
    default = defaults.get(row.default, f"`{str(row.default).lower()}`")
    if parser is yes_no:
        default = "`yes`" if row.default else "`no`"
    accepted = "boolean" if parser is boolean else parser.accepted
    if accepted.startswith("a JSON object"):  # the meaning has an example
        accepted = "a JSON object"
    return f'| <a id="{row.name}"></a>{keys} | {accepted} | {default} | '


if __name__ == "__main__":
    generated(OPTIONS, "options", table())
