"""What the documents say is so: their code runs, their links lead somewhere, nothing is missing."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import documentation
import pytest
import walkthrough
import yaml
from documentation import DOCS, PAGES, PRINTS, ROOT, Block
from walkthrough import Walkthrough

from docs import figures
from torch_py_backend import errors
from torch_py_backend.config import model_config, pbtxt

_BLOCKS = [block for page in PAGES for block in documentation.blocks(page)]
_WITHOUT_SERVER = [
    page for page in PAGES if walkthrough.followed(page) and not walkthrough.serves(page)
]
_SITE = ROOT / "mkdocs.yml"
# Where a sentence goes on with what its place tells.
_FILLED = re.compile(r"…(?: is )?|; expected ")
_TROUBLESHOOTING = DOCS / "troubleshooting.md"
_CLASSES = [
    one.__name__
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, errors.BackendError)
]


def _named(block: Block) -> str:
    return block.place


def test_table_of_options() -> None:
    """Every parameter, its values and default; `python tests/documentation.py` writes it."""
    assert documentation.table_in_page() == documentation.table()


# --- blocks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("block", _BLOCKS, ids=_named)
def test_block(block: Block) -> None:
    """Every block can be read as what its fence says; what is not run has its reason there."""
    check = {
        "python": _check_python,
        "sh": commands.check,
        "pbtxt": lambda _: None,  # below
        "json": lambda one: json.loads(one.text),
        "yaml": lambda one: list(yaml.safe_load_all(one.text)),
        "text": _check_text,
    }.get(block.language)
    assert check is not None, f"{block.place}: a fence with python, sh, pbtxt, json, yaml or text"
    assert re.fullmatch(r"[\w./-]*", block.file), f"{block.place}: the title is no file's name"
    check(block)


def _check_python(block: Block) -> None:
    ast.parse(block.text)


def _check_text(block: Block) -> None:
    """Nobody runs it: it is what was printed, or a picture."""
    assert block.title in ("", PRINTS), block.place


@pytest.mark.parametrize("block", [one for one in _BLOCKS if one.language == "pbtxt"], ids=_named)
def test_config(block: Block, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every config, or piece of one, is what Triton reads and this backend takes."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.pbtxt").write_text(block.text, encoding="utf-8")
    document = pbtxt.read(folder)
    complete = bool(document["input"] and document["output"])
    model_config.parse(pbtxt.arguments(folder, "1", document), complete=complete)
    assert not caplog.messages


def test_files_are_named_in_the_text() -> None:
    """GitHub does not show a fence's title: the text has the file's name, too."""
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for block in documentation.blocks(page):
            assert not block.file or f"`{block.file}`" in prose, block.place


@pytest.mark.slow
@pytest.mark.parametrize("page", _WITHOUT_SERVER, ids=lambda page: page.stem)
def test_page(page: Path, tmp_path: Path) -> None:
    """A page, followed in an empty folder, does what it says."""
    with Walkthrough(tmp_path) as reader:
        reader.follow(page)


@pytest.mark.parametrize(
    "text",
    [
        "torch-py-backend serf models",
        "torch-py-backend serve models --htp-port=1",
        "torch-py-backend bench models",
        "pip install 'torch-py-backend[servers]'",
        "python -m benchmarks.nothing",
        "python examples/nothing.py",
        "make nothing",
        "curl localhost:9000/v2",
        "docker ps",
    ],
)
def test_misspelt_command(text: str) -> None:
    """What a reader could not type is found without running it."""
    with pytest.raises(commands.CommandError):
        commands.check(Block("here:1", "sh", "", text))


def test_prints_what_it_does_not(tmp_path: Path) -> None:
    """A page that promises another output than there is fails."""
    page = tmp_path / "page.md"
    page.write_text('```python\nprint(1)\n```\n\n```text title="prints"\n2\n```\n')
    with Walkthrough(tmp_path) as reader, pytest.raises(AssertionError, match=r"page\.md:5"):
        reader.follow(page)


# --- links and the site ----------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links(page: Path) -> None:
    """Files and headings that a page leads to are there, on GitHub as on the site."""
    for link in documentation.links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or anchor in documentation.anchors(target), link


def test_every_page_is_in_the_navigation() -> None:
    """A page that nothing leads to is read by nobody: `nav` in mkdocs.yml lists it."""
    listed = set(_leaves(yaml.safe_load(_SITE.read_text())["nav"]))
    assert {page.name for page in DOCS.glob("*.md")} <= listed


def _leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [leaf for part in parts for leaf in _leaves(part)]


def test_site(tmp_path: Path) -> None:
    """MkDocs builds the site, strictly: no page, link or heading is missing."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "prints accuracy and speed" in (tmp_path / "index.html").read_text()
    assert (tmp_path / "contributing" / "index.html").is_file()
    assert not list(tmp_path.rglob("*.py"))


# --- troubleshooting -------------------------------------------------------------------------


@pytest.mark.parametrize("name", _CLASSES)
def test_every_error_has_its_entry(name: str) -> None:
    """Each class of the error tree is a heading of the page on troubleshooting."""
    assert f"`{name}`\n" in _TROUBLESHOOTING.read_text(encoding="utf-8")


def test_messages_are_those_of_the_code() -> None:
    """Each message on that page stands in the code; an ellipsis is what differs."""
    sentences = "\n".join(
        text
        for path in (ROOT / "src").rglob("*.py")
        for text in _texts(ast.parse(path.read_text()))
    )
    rows = [
        line.split("`")[1]
        for line in _TROUBLESHOOTING.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    assert len(rows) > len(_CLASSES)
    for row in rows:
        for part in _FILLED.split(row):
            assert part.strip() in sentences, row


def _texts(tree: ast.AST) -> list[str]:
    """The strings of a file, with an ellipsis for what is filled in."""
    return [
        "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…"
            for part in (node.values if isinstance(node, ast.JoinedStr) else [node])
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Constant)
    ]


# --- figures ---------------------------------------------------------------------------------


def test_figures_are_those_of_the_benchmarks(tmp_path: Path) -> None:
    """The performance guide shows docs/benchmarks.md; `python docs/figures.py` makes it so."""
    assert figures.table_in_guide() == figures.table()
    figures.draw(tmp_path / "throughput.svg")
    # Not all of it: it differs with the versions of what draws it.
    for plot in (tmp_path / "throughput.svg", figures.PLOT):
        assert figures.description() in plot.read_text(encoding="utf-8")
