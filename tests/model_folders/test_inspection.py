"""A model that is loaded without a server: its report, a comparison, measurements."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import build
import command_line
import fake_triton
import instances
import pytest
import torch

from torch_py_backend.config import pbtxt
from torch_py_backend.errors import LoadError
from torch_py_backend.model_folders import inspection, tuning

_X = {"name": "x", "data_type": "TYPE_FP32", "dims": [4]}
_SIZES = {
    "kind": "BATCH_ELEMENT_COUNT",
    "target_name": ["sizes"],
    "data_type": "TYPE_INT32",
    "source_input": ["x"],
}
_COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
_RAGGED = {"input": [_X | {"allow_ragged_batch": True}], "batch_input": [_SIZES]}

pytestmark = pytest.mark.usefixtures("process", "imports")


def _arguments(folder: Path, source: str, **document: Any) -> dict[str, str]:
    """Return Triton's arguments for a function with this statement."""
    build.write(folder, "model.py", f"def forward(x, sizes=None):\n    {source}\n")
    return build.arguments(**document) | {"model_repository": str(folder)}


@pytest.mark.parametrize(
    ("returned", "document"),
    [("x", {"max_batch_size": 0}), ("x.reshape(sizes.shape[0], -1)", _RAGGED)],
)
def test_figures_are_of_one_row_and_of_a_full_batch_and_the_error_relative(
    returned: str, document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_SECONDS", 0.0)
    monkeypatch.setattr(tuning, "_ROUNDS", 2)
    configured = _arguments(tmp_path, f"return 2 * {returned}", **document)
    candidate = _arguments(tmp_path / "other", f"return 2.2 * {returned}", **document)
    figures = tuning.measure(candidate, configured)
    assert figures.pop("kind") == "MODULE"
    assert figures.pop("error") == pytest.approx(0.1, rel=0.2)
    assert min(*figures.pop("gains"), *figures.values()) > 0


_STATES = "written BYTES [1]; told BYTES [1]; new_pages BYTES [1] (state); new_story"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("function", "x FP32 [4] → x; y FP32 [4]"),
        ("states_of_strings_and_files", f"total FP32 [4] (state) → total; y FP32 [4]; {_STATES}"),
        ("signals_uint64_direct", "; END FP32 [1] (control) → END; READY BOOL [1] (control) → "),
        ("batch_output", "; sizes INT32 (BATCH_ELEMENT_COUNT of x) → sizes; y FP32 [-1]; mean"),
    ],
)
def test_report_says_what_the_model_takes_and_gives(name: str, says: str, tmp_path: Path) -> None:
    folder = instances.named(name).lay_out(tmp_path)
    before = command_line.tree(tmp_path)
    report = inspection.inspect(fake_triton.arguments(folder))
    assert says in "; ".join(report["inputs"] + report["outputs"])
    assert report["artifact"] == "model.py: Python source and weights"
    assert json.loads(json.dumps(report)) == report
    assert report["warnings"] == []
    assert command_line.tree(tmp_path) == before


def test_report_has_the_options_the_warnings_and_the_graphs_of_the_load(tmp_path: Path) -> None:
    torch._dynamo.utils.counters.clear()  # of other tests in this process
    parameters = pbtxt.parameters({"NUM_THREADS": "1", _COMPILE: {"backend": "eager"}})
    document = {"input": [_X | {"name": "a"}], "parameters": parameters}
    report = inspection.inspect(_arguments(tmp_path, "return x + 1", **document))
    assert report["options"] == {"NUM_THREADS": 1, _COMPILE: {"backend": "eager"}}
    assert report["threads"][0] == 1
    assert re.fullmatch(r"2 graphs; the load took \d+\.\d s", report["compiled"])
    assert report["inputs"] == ["a FP32 [4] → x"]
    (warning,) = report["warnings"]
    assert f"the input names a are not all arguments of {report['signature']}" in warning


def test_model_that_loads_and_cannot_run_is_refused(tmp_path: Path) -> None:
    given = _arguments(tmp_path, "return x.missing")
    with pytest.raises(LoadError, match="missing"):
        inspection.inspect(given)
    parameters = pbtxt.parameters({"WARMUP": "off"})
    given = _arguments(tmp_path, "return x.missing", parameters=parameters)
    assert inspection.inspect(given)["options"]["WARMUP"] is False
