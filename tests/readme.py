"""The README's code blocks, and the table of parameters that it must hold."""

from __future__ import annotations

import re
from pathlib import Path

from torch_py_backend.options import TABLE, OptionRow

PATH = Path(__file__).parents[1] / "README.md"
TEXT = PATH.read_text(encoding="utf-8")


def block_after(words: str) -> str:
    """The first fenced code block after these words."""
    match = re.search(r"```\w*\n(.*?)```", TEXT[TEXT.index(words) :], flags=re.DOTALL)
    assert match is not None, words
    return match[1]


def table() -> str:
    """The table of parameters, as the code has it."""
    rows = ["| parameter | value | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, TABLE)])


_TABLE = re.compile(r"(<!-- options:[^\n]*-->\n)(.*?)(<!-- end of options -->)", flags=re.DOTALL)


def table_in_readme() -> str:
    match = _TABLE.search(TEXT)
    assert match is not None
    return match[2].strip()


def _row(row: OptionRow) -> str:
    keys = ", ".join(f"`{key}`" for key in (row.key, *row.also))
    default = {None: "unset", (): "`none`"}.get(row.default, f"`{str(row.default).lower()}`")
    return f"| {keys} | {row.parser.accepted} | {default} | {row.doc} |"


if __name__ == "__main__":
    # python tests/readme.py: write the table into the README.
    PATH.write_text(_TABLE.sub(lambda old: f"{old[1]}{table()}\n{old[3]}", TEXT), encoding="utf-8")
