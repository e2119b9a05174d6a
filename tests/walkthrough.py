"""A page of the documentation, followed as its reader would: files written, code and commands run.

What is followed is a page with files or Python code. It runs in this process, which need not import
torch again, and so do the models that its code serves. Its clients ask the server that the page
started with `torch-py-backend serve`, a real one.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shlex
import subprocess
import tempfile
import urllib.request
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import command_line
import documentation
import instances
import pytest
import serving
import supervised
import typer
from documentation import PRINTS, Block
from supervised import Supervised

from torch_py_backend import cli
from torch_py_backend.local_server import LocalServer, Outputs

if TYPE_CHECKING:
    from typing_extensions import Self

# Why a block that downloads a model is not run.
DOWNLOADS = "downloads a model"
# How long loads are kept up: the figures are nobody's.
_SECONDS = 280
_URL = re.compile(r"localhost:(\d+)")
_SERVICES = {"8000": "http", "8001": "grpc", "8002": "metrics", "8003": "health"}
# Beside torch-py-backend; a reader's machine has them.
_KNOWN = re.compile(r"pip|(.venv/bin/)?python|make|curl|mkdir|pytest|cp|mv|sed|sha256sum")


def _commands(block: Block) -> list[list[str]]:
    """The words of each command; without comments, and without variables set for it alone."""
    joined = block.text.replace("\\\n", " ")
    found = [shlex.split(line, comments=True) for line in joined.splitlines()]
    starts = re.compile(r"[A-Z_]+=.*")
    return [[*itertools.dropwhile(starts.fullmatch, words)] for words in found if words]


def check_commands(block: Block) -> None:
    """Refuse what the command line would refuse, and what the tests cannot run."""
    for name, *arguments in filter(None, _commands(block)):
        if name == "torch-py-backend":
            group: Any = typer.main.get_command(cli.commands)
            context = group.make_context(name, list(arguments))
            told, command, rest = group.resolve_command(context, list(arguments))
            command.make_context(told, rest)
        else:
            assert _KNOWN.fullmatch(name) or block.reason, (
                f'{block.place}: {name} cannot be run; say why in the fence: title="Example: …"'
            )


def followed(page: Path) -> bool:
    return any(
        one.file or (one.runs and one.language == "python") for one in documentation.blocks(page)
    )


def follow(page: Path, folder: Path, downloads: Mapping[str, str] | None = None) -> None:
    """Do what a page says in a folder, and stop the server that it started.

    Args:
        page: the page.
        folder: an empty folder, or one with what the page downloads.
        downloads: local names for what is downloaded; None: blocks that download are skipped.
    """
    with contextlib.ExitStack() as running:
        _Reader(folder, downloads or {}, running).follow(page)


class ServedHere(LocalServer):
    """What `torch_py_backend.serve` gives, but its models are in this process."""

    def start(self) -> Self:
        folders = sorted(Path(self.repository).iterdir())
        copies = Path(tempfile.mkdtemp(dir=folders[0].parents[1]))
        self._models = {one.name: instances.copied(copies, one) for one in folders}
        self.__dict__["client"] = mock.Mock(get_model_metadata=self._metadata)
        return self

    __enter__ = start

    def stop(self) -> None:
        for one in reversed(self._models.values()):  # their inference modes nest
            one.model.finalize()

    def infer(self, model: str, inputs: Any, *, version: str = "") -> Outputs:
        sent = {one.name(): serving.sent_array(one) for one in self._inputs(model, inputs, version)}
        served = self._models[model]
        ((response,),) = served.send(served.request(sent))
        assert response.error() is None, response.error().message()
        return {one.name(): one.as_numpy() for one in response.output_tensors()}

    def _metadata(self, model: str, version: str) -> Any:
        document = self._models[model].document
        rows = [-1] if document["max_batch_size"] else []
        inputs = []
        for one in document["input"]:
            kind = one["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
            inputs.append(mock.Mock(datatype=kind, shape=rows + one["dims"]))
            inputs[-1].name = one["name"]
        return mock.Mock(inputs=inputs)


@dataclass
class _Reader:
    folder: Path
    downloads: Mapping[str, str]
    running: contextlib.ExitStack
    printed: str = ""
    served: Supervised | None = None

    def follow(self, page: Path) -> None:
        """Do what the page says, from top to bottom."""
        for block in documentation.blocks(page):
            if block.file:
                path = self.folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            elif block.title == PRINTS:
                _compare(block, self.printed)
            elif self.downloads and block.reason == DOWNLOADS:
                text = block.text
                for name, local in self.downloads.items():
                    text = text.replace(name, local)
                self.printed = self._python(block, text)
            elif block.runs and block.language == "python":
                self.printed = self._python(block, self._here(block.text))
            elif block.runs:
                self.printed = "".join(self._command(block, one) for one in _commands(block))

    def _command(self, block: Block, words: Sequence[str]) -> str:
        name, *arguments = [self._here(word) for word in words]
        if name == "torch-py-backend" and arguments[0] == "serve":
            return self._serve(arguments[1:])
        if name == "torch-py-backend" and arguments[0] in ("init", "check"):
            return _checked(block, command_line.run(*arguments, cwd=self.folder))
        if name == "curl":
            return _curl(block, arguments)
        return ""  # install writes where the server is, tune takes minutes

    def _python(self, block: Block, text: str) -> str:
        printed = io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(printed),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            patch.chdir(self.folder)
            patch.syspath_prepend(self.folder)
            exec(compile(text, block.place, "exec"), {"__name__": "__main__"})
        return printed.getvalue()

    def _serve(self, arguments: Sequence[str]) -> str:
        """Start it, and wait until it serves; it is stopped before another one."""
        self.running.close()
        serving = supervised.serve(
            self.folder / arguments[0], *arguments[1:], verbose="", TMPDIR=str(self.folder)
        )
        self.served = self.running.enter_context(serving)
        self.served.wait_loaded()
        assert "FAILED" not in self.served.log
        return self.served.log

    def _here(self, text: str) -> str:
        return _URL.sub(
            lambda found: str(getattr(self.served, _SERVICES.get(found[1], ""), found[0])), text
        )


def _checked(block: Block, done: subprocess.CompletedProcess[str]) -> str:
    """Return what a command printed, which has ended as it should."""
    told = f"{block.place}: {shlex.join(done.args)}\n{done.stdout}{done.stderr}"
    if "check" in done.args:  # also says what is wrong with the machine
        assert "OK      " in done.stdout, told
        assert "FAILED" not in done.stdout, told
    else:
        assert done.returncode == 0, told
    return done.stdout


def _curl(block: Block, arguments: Sequence[str]) -> str:
    named = next(word for word in arguments if not word.startswith("-"))
    url = named if "://" in named else f"http://{named}"
    sent = arguments[arguments.index("-d") + 1].encode() if "-d" in arguments else None
    with urllib.request.urlopen(url, sent, timeout=_SECONDS) as response:
        assert response.status == 200, block.place
        return str(response.read().decode())


def _compare(block: Block, printed: str) -> None:
    """What the page says was printed was printed; an ellipsis stands for anything."""
    said = re.escape(_squeezed(block.text)).replace("…", ".*")
    assert re.search(said, _squeezed(printed)), f"{block.place}: {printed}"


def _squeezed(text: str) -> str:
    return " ".join(text.split())
