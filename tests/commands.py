"""The shell commands of the documentation: split into words, and checked without being run."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import typer
from documentation import ROOT, Block

from torch_py_backend import cli

# What Triton's own ports are, and that of /live and /ready.
PORTS = (8000, 8001, 8002, 8003)
_URL = re.compile(r"(?:https?://)?localhost:(\d+)(/.*)?")


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
    """Refuse what is misspelt, or leads to what is not there.

    Raises:
        CommandError: it could not be typed like that.
    """
    for words in lines(block):
        known = _CHECKS.get(words[0]) if words else None
        if known is not None:
            known(words[1:])
        elif words and not block.reason:
            raise CommandError(
                f"{block.place}: the tests cannot run {words[0]}; give the reason in the fence:"
                ' title="Example: …"'
            )


def _ours(arguments: Sequence[str]) -> None:
    """As the command line itself parses it; nothing is run."""
    group: Any = typer.main.get_command(cli.commands)
    try:
        context = group.make_context("torch-py-backend", list(arguments))
        name, command, rest = group.resolve_command(context, list(arguments))
        command.make_context(name, rest)
    except Exception as error:  # whatever the parser's library has for it
        raise CommandError(f"torch-py-backend {shlex.join(arguments)}: {error}") from error


def _pip(arguments: Sequence[str]) -> None:
    """Extras that the package has."""
    written = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    optional = written.partition("[project.optional-dependencies]")[2].partition("\n[project.")[0]
    extras = set(re.findall(r"^(\w+) = \[", optional, flags=re.MULTILINE))
    for argument in arguments:
        match = re.match(r"(?:torch-py-backend|\.)\[([\w,]+)\]", argument)
        if match and not set(match[1].split(",")) <= extras:
            raise CommandError(f"pip {shlex.join(arguments)}: the extras are {sorted(extras)}")


def _python(arguments: Sequence[str]) -> None:
    """A module, or a script of the repository."""
    if arguments[0] == "-m":
        found = importlib.util.find_spec(arguments[1]) is not None
    else:
        found = (ROOT / arguments[0]).is_file()
    if not found:
        raise CommandError(f"python {shlex.join(arguments)}: there is no such program")


def _make(arguments: Sequence[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    if arguments and arguments[0] not in targets:
        raise CommandError(f"make {arguments[0]}: the targets are {targets}")


def url(arguments: Sequence[str]) -> str:
    """What curl asks for: the argument that is no flag."""
    return next((one for one in arguments if not one.startswith("-")), "")


def _curl(arguments: Sequence[str]) -> None:
    match = _URL.fullmatch(url(arguments))
    if match is None or int(match[1]) not in PORTS:
        raise CommandError(f"curl {shlex.join(arguments)}: expected localhost and one of {PORTS}")


def _any(_arguments: Sequence[str]) -> None:
    """Of the shell: they show what they do when they are run."""


_CHECKS: Mapping[str, Callable[[Sequence[str]], None]] = MappingProxyType(
    {
        "torch-py-backend": _ours,
        "pip": _pip,
        "python": _python,
        ".venv/bin/python": _python,
        "make": _make,
        "curl": _curl,
        "mkdir": _any,
        "pytest": _any,
        "cp": _any,
        "mv": _any,
        "sed": _any,
        "sha256sum": _any,
    }
)
