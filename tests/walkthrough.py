"""A page of the documentation, followed as its reader would: files written, code and commands run.

What is followed is a page with files or Python code. Its clients ask the server that the page
started with `torch-py-backend serve`.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import commands
import documentation
from documentation import PRINTS, ROOT, Block

if TYPE_CHECKING:
    from typing_extensions import Self

_APP = "from torch_py_backend.cli import app; app()"
_FREE = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--health-port=0")
_SERVING = re.compile(
    r"serving on http://(?P<http>\S+) and grpc://(?P<grpc>\S+);"
    r" metrics on http://(?P<metrics>\S+)/metrics, readiness on http://(?P<health>\S+)/ready"
)
# How long loads are kept up: the figures are nobody's.
_SECONDS = 280
_POLL_SECONDS = 0.1
_CHECK = "check"
_LOADED = "OK      "
_URL = re.compile(r"localhost:(\d+)")


def followed(page: Path) -> bool:
    """Whether the page is one to be followed."""
    return any(one.file or (one.runs and one.language == "python") for one in _blocks(page))


def serves(page: Path) -> bool:
    """Whether following it starts a server."""
    return followed(page) and any(map(_starts_server, filter(_runs, _blocks(page))))


def _starts_server(block: Block) -> bool:
    if block.language == "python":
        return "torch_py_backend.serve(" in block.text
    return any(words[:2] == ["torch-py-backend", "serve"] for words in commands.lines(block))


def _runs(block: Block) -> bool:
    return block.runs


def _blocks(page: Path) -> list[Block]:
    return documentation.blocks(page)


class Walkthrough:
    """One reader in an empty folder. A context manager: leaving stops the server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._printed = ""
        self._server: subprocess.Popen[bytes] | None = None
        self._addresses: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def follow(self, page: Path) -> None:
        """Do what the page says, from top to bottom."""
        for block in _blocks(page):
            if block.file:
                path = self._folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            elif block.title == PRINTS:
                _compare(block, self._printed)
            elif block.runs and block.language == "python":
                self._printed = self._run(block, sys.executable, "-c", self._here(block.text))
            elif block.runs:
                self._printed = "".join(self._command(block, one) for one in commands.lines(block))

    def _command(self, block: Block, words: Sequence[str]) -> str:
        name, *arguments = [self._here(word) for word in words]
        how = _WAYS.get(name)
        return "" if how is None else how(self, block, arguments)

    def _ours(self, block: Block, arguments: Sequence[str]) -> str:
        """`init` and `check` as they are, `serve` on free ports."""
        command = arguments[0]
        if command == "serve":
            return self._serve(block, arguments)
        if command not in ("init", "check"):
            return ""  # install writes where the server is, tune takes minutes
        return self._run(block, sys.executable, "-c", _APP, *arguments)

    def _shell(self, block: Block, arguments: Sequence[str]) -> str:
        return self._run(block, *arguments)

    def _curl(self, block: Block, arguments: Sequence[str]) -> str:
        named = commands.url(arguments)
        url = named if "://" in named else f"http://{named}"
        sent = arguments[arguments.index("-d") + 1].encode() if "-d" in arguments else None
        with urllib.request.urlopen(url, sent, timeout=_SECONDS) as response:
            assert response.status == 200, block.place
            return str(response.read().decode())

    def _run(self, block: Block, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self._folder, env=_environment(), text=True,
            capture_output=True, check=False, timeout=_SECONDS,
        )  # fmt: skip
        told = f"{block.place}: {shlex.join(command)}\n{done.stdout}{done.stderr}"
        # `check` also says what is wrong with the machine, which is not the page's affair.
        checks = _CHECK in command
        loaded = "FAILED" not in done.stdout and _LOADED in done.stdout
        failed = not loaded if checks else done.returncode != 0
        assert not failed, told
        return done.stdout

    # --- the server --------------------------------------------------------------------------

    def _serve(self, block: Block, arguments: Sequence[str]) -> str:
        """Start it, and wait until it serves; it is stopped before another one."""
        self._stop()
        # A file, not a pipe: nobody reads on once it serves.
        log = self._folder / "server.log"
        with log.open("wb") as file:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _APP, *arguments, *_FREE],
                cwd=self._folder, env=_environment() | {"TMPDIR": str(self._folder)},
                stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        deadline = time.monotonic() + _SECONDS
        while self._server.poll() is None and time.monotonic() < deadline:
            said = log.read_text(encoding="utf-8", errors="replace")
            match = _SERVING.search(said)
            if match is not None:
                assert "FAILED" not in said, f"{block.place}: {said}"
                self._addresses = match.groupdict()
                return said
            time.sleep(_POLL_SECONDS)
        raise AssertionError(f"{block.place}: {log.read_text(errors='replace')}")

    def _stop(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGTERM)
            self._server.wait(timeout=_SECONDS)
            self._server = None

    def _here(self, text: str) -> str:
        """The text with the ports of the page's server."""
        services = dict(
            zip(map(str, commands.PORTS), ("http", "grpc", "metrics", "health"), strict=True)
        )
        return _URL.sub(
            lambda found: self._addresses.get(services.get(found[1], ""), found[0]), text
        )


def _compare(block: Block, printed: str) -> None:
    """What the page says was printed was printed; an ellipsis stands for anything."""
    said = re.escape(_squeezed(block.text)).replace("…", ".*")
    assert re.search(said, _squeezed(printed)), f"{block.place}: {printed}"


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _environment() -> dict[str, str]:
    """The package from this tree; words that are not cut at the width of a terminal."""
    path = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    values = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "COLUMNS": "200", "TERM": "dumb"}
    return {**os.environ, **values, "PYTHONWARNINGS": "ignore"}


_WAYS: Mapping[str, Callable[[Walkthrough, Block, Sequence[str]], str]] = MappingProxyType(
    {
        "torch-py-backend": Walkthrough._ours,
        "curl": Walkthrough._curl,
        "pytest": lambda self, block, arguments: self._shell(
            block, [sys.executable, "-m", "pytest", *arguments]
        ),
        "cp": lambda self, block, arguments: self._shell(block, ["cp", *arguments]),
        "mv": lambda self, block, arguments: self._shell(block, ["mv", *arguments]),
        "sed": lambda self, block, arguments: self._shell(block, ["sed", *arguments]),
        "mkdir": lambda self, block, arguments: self._shell(block, ["mkdir", *arguments]),
    }
)
