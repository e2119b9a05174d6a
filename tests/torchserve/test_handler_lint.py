"""Finding problems in an archive's sources without running them."""

from __future__ import annotations

from pathlib import Path

import archives
import pytest

from torch_py_backend.torchserve import handler_lint


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ('def handle(data, context):\n    return [row.get("body") for row in data]', "body"),
        ('def handle(data, context):\n    return [row["data"] for row in data]', "data"),
        ("x = row.get('data') or row.get('body')", "body"),
        ("body = 1\ndata = 2", None),
        ("no Python", "body"),
        (None, "body"),
    ],
)
def test_body_field(tmp_path: Path, source: str | None, name: str | None) -> None:
    """The field is the key in the handler's source; TorchServe's own handlers read `body`."""
    files = {} if source is None else {"handler.py": source}
    archives.write_folder(tmp_path, files)
    assert handler_lint.body_field(tmp_path, "handler") == name


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os, json\nfrom pathlib import Path", None),
        ("import beside\nfrom package import part\nfrom . import other", None),
        ("from ts.torch_handler.base_handler import BaseHandler", None),
        ("from ts.torch_handler import image_classifier", None),
        ("from ts.handler_utils import micro_batching", "ts.handler_utils.micro_batching of Torch"),
        (
            "import ts.service",
            "ts.service of TorchServe is not provided: its import fails (handler",
        ),
        ("import no_such_package.part", "no_such_package is not installed here"),
        ("context.metrics.add_counter('a', 1)", "metrics of the handler are not recorded"),
        ("def get_insights(self): ...", "explanations: Triton has no such requests"),
        (
            "from ts.handler_utils.utils import send_intermediate_predict_response",
            "streamed answers: the call raises an error",
        ),
        ("(" * 100_000, None),
        ("\0", None),
        ("import no_such_package\n" + "#" * (1 << 20), None),
    ],
)
def test_problems(tmp_path: Path, source: str, message: str | None) -> None:
    """Imports that fail and calls without effect are reported with their file."""
    files = {
        "handler.py": source,
        "beside.py": "",
        "package/__init__.py": "",
        "package/part.py": "",
        "other.py": "",
        "folder.py/notes.txt": "",
    }
    problems = handler_lint.problems(archives.write_folder(tmp_path / "net", files))
    if message is None:
        assert problems == []
    else:
        (problem,) = problems
        assert problem.startswith(message)
        assert problem.endswith("(handler.py)")


def test_one_problem_in_several_files(tmp_path: Path) -> None:
    """A problem of several files is reported once, with their names."""
    source = "import no_such_package\nimport no_such_package.part\n"
    files = {"a.py": source, "b/c.py": source}
    (problem,) = handler_lint.problems(archives.write_folder(tmp_path, files))
    assert problem.endswith("(a.py, b/c.py)")
