from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from torch_py_backend.loading import discovery


def _lay_out(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "net.py"


def _files(source: Path) -> dict[str, str]:
    """Return the files of a source: name in the version folder → relative path."""
    files = discovery.source_files(source)
    return {name: path.relative_to(source.parent).as_posix() for name, path in files.items()}


_FAST = f"fast{EXTENSION_SUFFIXES[0]}"


@pytest.mark.parametrize(
    ("contents", "empty", "expected"),
    [
        (
            {
                "net.py": "import a, both, fast, broken, null, absent",
                "a.py": "# -*- coding: latin-1 -*-\ndef f():\n    import b\nfrom net import X",
                "b.py": "import a",
                _FAST: "\x7fELF",
                "broken.py": "def broken(:",
                "null.py": "x = '\0'",
            },
            "both.py both/__init__.py absent.txt",
            f"a.py net.py b.py both/__init__.py broken.py null.py {_FAST}",
        ),
        (
            {
                "net.py": "from blocks.conv import X",
                "blocks/conv.py": "from . import norm\nfrom .. import outside\nimport sizes",
            },
            "blocks/__init__.py blocks/norm.py blocks/a/b blocks/__pycache__/x blocks/.x sizes.py",
            "blocks/__init__.py blocks/conv.py blocks/norm.py blocks/a/b sizes.py",
        ),
        (  # a package without __init__.py
            {
                "net.py": "import plain.conv",
                "plain/conv.py": "from .parts import x\nimport sizes",
            },
            "plain/parts.py plain/weights.pt sizes.py",
            "plain/conv.py plain/parts.py sizes.py",
        ),
        ({"net.py": "def broken(:"}, "a.py", ""),
    ],
)
def test_imports_are_followed_and_packages_are_whole(
    contents: dict[str, str], empty: str, expected: str, tmp_path: Path
) -> None:
    files = _files(_lay_out(tmp_path, contents | dict.fromkeys(empty.split(), "")))
    assert files.pop("model.py") == "net.py"
    assert files == {name: name for name in expected.split()}


def test_index_is_renamed_and_shards_beside_it_keep_their_names(tmp_path: Path) -> None:
    outside = os.fspath(tmp_path / "secret.safetensors")
    keys = dict(
        enumerate(["net-1.safetensors", "gone.safetensors", "../secret.safetensors", outside])
    )
    index = json.dumps({"weight_map": keys})
    files = {"net.py": "", "net.safetensors.index.json": index, "net-1.safetensors": ""}
    source = _lay_out(tmp_path / "mine", files)
    _lay_out(tmp_path, {"secret.safetensors": "", "mine/other.safetensors": ""})
    assert _files(source) == {
        "model.py": "net.py",
        "model.safetensors.index.json": "net.safetensors.index.json",
        "net-1.safetensors": "net-1.safetensors",
    }
