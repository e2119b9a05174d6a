"""Check README.md, CONTRIBUTING.md, docs/ and examples/: part of `make lint`.

Links to files and headings lead somewhere, on GitHub and on the site. Code spans and code blocks
name no option, command, flag or value that was removed. docs/troubleshooting.md names each class of
the error tree, and messages that the code has.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from torch_py_backend import errors
from torch_py_backend.config.removed_names import NAMES

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
)
_TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
# In a message on that page: a span of code, and where it continues with a value.
_QUOTE = re.compile(r"``(.+?)``|`([^`]+)`")
_VALUE = re.compile(r"…(?: is )?|(?:; |^)expected ")
# The page for those who come from an older repository may name what is gone.
_MAY_NAME_REMOVED = {"CHANGELOG.md", "migrate.md"}
_MARKDOWN = MarkdownIt().enable("table")
# Options and flags are words of their own; values of OPTIMIZE and commands occur in other senses,
# and count only in a context.
_REMOVED = re.compile(
    "|".join(
        [
            r"['\"]STATE['\"]",
            *(rf"(?<!\w){name}\b" for name in NAMES["parameter"] if name != "STATE"),
            *(rf"(?<!\S){flag}\b" for flag in NAMES["flag"]),
            *(rf"torch-py-backend {command}\b" for command in NAMES["command"]),
            *(rf"\b{value}\b" for value in NAMES["OPTIMIZE"] if "_" in value),
            *(rf"format=['\"]{name}['\"]" for name in NAMES["format"]),
        ]
    )
)


def tokens(page: Path) -> list[Token]:
    return _MARKDOWN.parse(page.read_text(encoding="utf-8"))


def links(page: Path) -> Iterator[str]:
    """Yield the targets of the links and images of a page."""
    for token in tokens(page):
        for child in token.children or ():
            if child.type in ("link_open", "image"):
                yield str(child.attrs.get("href") or child.attrs.get("src"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub and MkDocs make them: headings and elements' ids."""
    headings = [
        after.content
        for token, after in itertools.pairwise(tokens(page))
        if token.type == "heading_open"
    ]
    slugs = {
        re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", text.lower()).strip()) for text in headings
    }
    return slugs | set(re.findall(r'<a id="([^"]+)"', page.read_text(encoding="utf-8")))


def broken_links(page: Path) -> Iterator[str]:
    """Yield a message for each link that leads nowhere; addresses of other sites are not opened."""
    for link in links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            yield f"the link {link} leads to no file"
        elif anchor and anchor not in anchors(target):
            yield f"the link {link} leads to no heading"


def code(page: Path) -> Iterator[str]:
    """Yield the code spans and the code blocks of a page."""
    for token in tokens(page):
        if token.type in ("fence", "code_block"):
            yield token.content
        for child in token.children or ():
            if child.type == "code_inline":
                yield child.content


def removed_in(texts: Iterator[str]) -> Iterator[str]:
    """Yield a message for each removed name in the texts."""
    for text in texts:
        for match in _REMOVED.finditer(text):
            yield f"'{match[0]}' was removed, see config/removed_names.py"


def missing_errors() -> Iterator[str]:
    """Yield a message for each class of the error tree that the page does not name."""
    text = _TROUBLESHOOTING.read_text(encoding="utf-8")
    for name, value in vars(errors).items():
        is_error = isinstance(value, type) and issubclass(value, errors.BackendError)
        if is_error and f"`{name}`" not in text:
            yield f"the error {name} is missing"


def unknown_messages() -> Iterator[str]:
    """Yield a message for each text of the page that is not in the code; … stands for a value."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    known = "\n".join(text for source in sources for text in strings(ast.parse(source)))
    rows = _TROUBLESHOOTING.read_text(encoding="utf-8").splitlines()
    cells = [row.split(" | ")[0] for row in rows if row.startswith("| `")]
    for first, second in (quote for cell in cells for quote in _QUOTE.findall(cell)):
        for part in _VALUE.split(first or second):
            if part.strip() not in known:
                yield f"the message '{part.strip()}' is not in the code"


def strings(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a file, with an ellipsis for each formatted value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.Constant):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts
            )


def problems() -> Iterator[str]:
    """Yield a line for each problem: the file and what is wrong."""
    for page in PAGES:
        place = page.relative_to(ROOT)
        yield from (f"{place}: {problem}" for problem in broken_links(page))
        if page.name not in _MAY_NAME_REMOVED:
            yield from (f"{place}: {problem}" for problem in removed_in(code(page)))
    for problem in (*missing_errors(), *unknown_messages()):
        yield f"{_TROUBLESHOOTING.relative_to(ROOT)}: {problem}"
    for file in sorted((ROOT / "examples").rglob("*")):
        if file.suffix in (".py", ".pbtxt"):
            text = file.read_text(encoding="utf-8")
            yield from (f"{file.relative_to(ROOT)}: {line}" for line in removed_in(iter([text])))


def main() -> int:
    """Print the problems. Return 1 if there are some."""
    lines = list(problems())
    print(*lines, sep="\n", end="\n" if lines else "")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
