"""Print the size of the project and check it against its limits: `make budget`.

Each issue may lower a limit of `LIMITS`; none is ever raised. The last limits keep code from being
made denser to reach the others.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Limit(NamedTuple):
    """One number of the project, and the least or most that it may be."""

    name: str
    bound: float
    at_least: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


LIMITS = {
    "src": Limit("lines of src", 13_000),
    "tests": Limit("lines of tests", 20_000),
    "words": Limit("words of docs, CONTRIBUTING and README", 17_350),
    "longest": Limit("longest file of src, lines", 400),
    "tokens": Limit("tokens per line of code in src", 8.5),
    "prose": Limit("docstrings and comments, % of lines of src", 14, at_least=True),
    "columns": Limit("longest line of src, columns", 100),
}

# What tools read at the end of a line does not count as its width.
_PRAGMA = re.compile(r"\s*#\s*(noqa|type: ignore|pragma).*")
# Tokens that are layout, not code.
_LAYOUT = {
    tokenize.ENCODING,
    tokenize.NEWLINE,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def tracked(*patterns: str) -> list[Path]:
    """Return the files of the repository that match, those not yet added included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [ROOT / line for line in output.splitlines()]
    return [path for path in paths if path.is_file()]


def count_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def docstring_lines(source: str) -> set[int]:
    """Return the numbers of the lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def density(paths: Iterable[Path]) -> tuple[float, float]:
    """Return the tokens per line of code, and the share of docstrings and comments in percent."""
    tokens = code = prose = total = 0
    for path in paths:
        source = path.read_text(encoding="utf-8")
        total += len(source.splitlines())
        docstrings = docstring_lines(source)
        comments, statements = set[int](), set[int]()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            line = token.start[0]
            if token.type == tokenize.COMMENT:
                comments.add(line)
            elif token.type not in _LAYOUT and line not in docstrings:
                tokens += 1
                statements.update(range(line, token.end[0] + 1))
        code += len(statements)
        prose += len(docstrings | comments)
    return tokens / code, 100 * prose / total


def measure() -> dict[str, float]:
    """Return the value of each key of `LIMITS`."""
    sources = tracked("src/*.py")
    texts = [path.read_text(encoding="utf-8") for path in sources]
    pages = tracked("docs/*.md", "CONTRIBUTING.md", "README.md")
    tokens, prose = density(sources)
    return {
        "src": count_lines(sources),
        "tests": count_lines(tracked("tests/*.py")),
        "words": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
        "longest": max(len(text.splitlines()) for text in texts),
        "tokens": tokens,
        "prose": prose,
        "columns": max(len(_PRAGMA.sub("", line)) for text in texts for line in text.splitlines()),
    }


def main() -> int:
    """Print a row for each limit. Return 1 if one does not hold."""
    failed = False
    for key, value in measure().items():
        limit = LIMITS[key]
        holds = limit.holds(value)
        failed = failed or not holds
        bound = f"at {'least' if limit.at_least else 'most'} {limit.bound:,}"
        shown = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
        print(f"{'ok' if holds else 'FAILED':8}{limit.name:44}{shown:>10}   {bound}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
