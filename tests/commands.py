"""The shell commands of the documentation: split into words, and checked without being run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

import typer
from documentation import Block

from torch_py_backend import cli

# What Triton's own ports are, and that of /live and /ready.
PORTS = (8000, 8001, 8002, 8003)
# Beside them, commands that walkthrough.py runs, or that are for the reader's machine.
_KNOWN = {
    "pip", "python", ".venv/bin/python", "make", "curl", "mkdir", "pytest", "cp", "mv", "sed",
    "sha256sum",
}  # fmt: skip


class CommandError(Exception):
    """A command that a reader could not type like that."""


def lines(block: Block) -> list[list[str]]:
    """The words of each command; without comments, and without variables set for it alone."""
    joined = block.text.replace("\\\n", " ")
    found = [shlex.split(line, comments=True) for line in joined.splitlines()]
    return [_without_variables(words) for words in found if words]


def _without_variables(words: Sequence[str]) -> list[str]:
    kept = list(words)
    while kept and re.fullmatch(r"[A-Z_]+=.*", kept[0]):
        kept.pop(0)
    return kept


def check(block: Block) -> None:
    """Refuse what the command line would refuse, and what the tests cannot run.

    Raises:
        CommandError: it could not be typed like that.
    """
    for name, *arguments in filter(None, lines(block)):
        if name == "torch-py-backend":
            _parse(arguments)
        elif name not in _KNOWN and not block.reason:
            raise CommandError(
                f"{block.place}: the tests cannot run {name}; give the reason in the fence:"
                ' title="Example: …"'
            )


def _parse(arguments: list[str]) -> None:
    """Parse arguments as the command line does; nothing is run."""
    group: Any = typer.main.get_command(cli.commands)
    try:
        context = group.make_context("torch-py-backend", list(arguments))
        name, command, rest = group.resolve_command(context, list(arguments))
        command.make_context(name, rest)
    except Exception as error:  # whatever the parser's library has for it
        raise CommandError(f"torch-py-backend {shlex.join(arguments)}: {error}") from error
