"""What an archive's sources use that is not here is told before anything is run."""

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
        ("x = [*row.values()]", None),
        ("no Python", "body"),
        (None, "body"),
    ],
)
def test_the_body_of_a_request(tmp_path: Path, source: str | None, name: str | None) -> None:
    """The input is called as the handler's source calls the body; TorchServe's own know `body`."""
    files = {} if source is None else {"handler.py": source}
    archives.write_folder(tmp_path, files)
    assert handler_lint.body(tmp_path, "handler") == name


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import os, json\nfrom pathlib import Path", None),
        ("import torch, numpy", None),
        ("import beside\nfrom package import part\nfrom . import other", None),
        ("from ts.torch_handler.base_handler import BaseHandler", None),
        ("from ts.torch_handler import image_classifier", None),
        ("import ts.utils.util", None),
        (
            "from ts.torch_handler.vllm_handler import X",
            "ts.torch_handler.vllm_handler of TorchSer",
        ),
        ("from ts.handler_utils import micro_batching", "ts.handler_utils.micro_batching of Torch"),
        (
            "import ts.service",
            "ts.service of TorchServe is not provided: its import fails (handler",
        ),
        ("import no_such_package.part", "no_such_package is not installed here"),
        ("context.metrics.add_counter('a', 1)", "metrics of the handler are counted nowhere"),
        ("context.get_request_header(0, 'x')", "a request's headers are None"),
        ("context.set_response_header(0, 'x', 'y')", "headers of a response are not sent"),
        ("def get_insights(self): ...", "explanations: there is no such request in Triton"),
        (
            "from ts.handler_utils.utils import send_intermediate_predict_response",
            "streamed answers: the call raises an error",
        ),
        ("x = (", None),
        ("(" * 100_000, None),
        ("\0", None),
        ("import no_such_package\n" + "#" * (1 << 20), None),
    ],
)
def test_remarks(tmp_path: Path, source: str, says: str | None) -> None:
    """Imports that fail and calls without effect are named with their file; the rest is silent."""
    files = {
        "handler.py": source,
        "beside.py": "",
        "package/__init__.py": "",
        "package/part.py": "",
        "other.py": "",
        "folder.py/notes.txt": "",
    }
    found = handler_lint.of(archives.write_folder(tmp_path / "net", files))
    if says is None:
        assert found == []
    else:
        (told,) = found
        assert told.startswith(says)
        assert told.endswith("(handler.py)")


def test_one_remark_for_all_files(tmp_path: Path) -> None:
    """What several files use is told once, with their names."""
    source = "import no_such_package\nimport no_such_package.part\n"
    files = {"a.py": source, "b/c.py": source}
    (told,) = handler_lint.of(archives.write_folder(tmp_path, files))
    assert told.endswith("(a.py, b/c.py)")
