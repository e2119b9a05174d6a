"""The documentation is true: its code runs, and the site is built from it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import documentation
import pytest
import walkthrough
import yaml
from documentation import PAGES, PRINTS, ROOT, Block

from docs import figures
from torch_py_backend.config import model_config, pbtxt

_every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def test_table_of_options() -> None:
    """docs/options.md has the code's options; `python tests/documentation.py` adds new ones."""
    assert documentation.generated(documentation.OPTIONS, "options") == documentation.table()
    assert " |  |" not in documentation.table()  # each has a meaning


def _check_text(block: Block) -> None:
    assert block.title in ("", PRINTS)


_CHECKS: dict[str, Callable[[Block], object]] = {
    "python": lambda block: ast.parse(block.text),
    "sh": walkthrough.check_commands,
    "pbtxt": lambda _: None,  # test_configs
    "json": lambda block: json.loads(block.text),
    "yaml": lambda block: list(yaml.safe_load_all(block.text)),
    "text": _check_text,
}


@_every_page
def test_blocks(page: Path) -> None:
    """Each block parses in its language; the text names its file, because GitHub hides titles."""
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in documentation.blocks(page):
        assert block.language in _CHECKS, block.place
        _CHECKS[block.language](block)
        assert not block.file or f"`{block.file}`" in prose, block.place


@_every_page
def test_configs(page: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each config, or piece of one, is read by Triton and accepted without a warning."""
    for block in documentation.blocks(page):
        if block.language == "pbtxt":
            (tmp_path / "config.pbtxt").write_text(block.text, encoding="utf-8")
            document = pbtxt.read(tmp_path)
            complete = bool(document["input"] and document["output"])
            model_config.parse(pbtxt.arguments(tmp_path, "1", document), complete=complete)
            assert not caplog.messages, block.place


def test_site(tmp_path: Path) -> None:
    """MkDocs builds the site, strictly: every page is in the navigation, every link works."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").is_file()
    assert (tmp_path / "contributing" / "index.html").is_file()
    assert not list(tmp_path.rglob("*.py"))


def test_figures_are_those_of_the_benchmarks(tmp_path: Path) -> None:
    """The performance guide has the figures of docs/benchmarks.md; docs/figures.py writes them."""
    assert figures.table_in_guide() == figures.table()
    figures.draw(tmp_path / "throughput.svg")
    # The rest of the file depends on matplotlib's version.
    for plot in (tmp_path / "throughput.svg", figures.PLOT):
        assert figures.description() in plot.read_text(encoding="utf-8")
