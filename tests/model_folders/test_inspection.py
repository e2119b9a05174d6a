"""A model that is loaded without a server: its report, a comparison, measurements."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import build
import pytest
import torch

from torch_py_backend.errors import LoadError
from torch_py_backend.model_folders import inspection, tuning

_X = {"name": "x", "data_type": "TYPE_FP32", "dims": [4]}
_RAGGED = _X | {"dims": [-1], "allow_ragged_batch": True}
_SIZES = {
    "kind": "BATCH_ELEMENT_COUNT",
    "target_name": ["sizes"],
    "data_type": "TYPE_INT32",
    "source_input": ["x"],
}
_SCATTERED = _SIZES | {"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "target_name": ["y"]}

pytestmark = pytest.mark.usefixtures("process", "imports")


def _arguments(folder: Path, source: str, **document: Any) -> dict[str, str]:
    """Return Triton's arguments for a function with this statement."""
    function = f"def forward(x, sizes=None, total=None, END=None):\n    {source}\n"
    build.write(folder, "model.py", function)
    return build.arguments(**document) | {"model_repository": str(folder)}


_FOUR = {"input": [_RAGGED | {"dims": [4]}], "batch_input": [_SIZES]}


@pytest.mark.parametrize(
    ("returned", "document"),
    [("x", {"max_batch_size": 0}), ("x.reshape(sizes.shape[0], -1)", _FOUR)],
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


def _parameters(**values: str) -> dict[str, Any]:
    return {key: {"string_value": value} for key, value in values.items()}


_STATE = {"input_name": "total", "output_name": "sum", "data_type": "TYPE_FP32", "dims": [4]}
_CONTROLS = [{"name": name, "control": [{"fp32_false_true": [0, 1]}]} for name in ("START", "END")]


@pytest.mark.parametrize(
    ("source", "document", "inputs", "outputs"),
    [
        (
            "return x",
            {"parameters": _parameters(NUM_THREADS="1", WARMUP="true")},
            ["x FP32 [4] → x"],
            ["y FP32 [4]"],
        ),
        ("return x", {"input": [_X | {"name": "a"}]}, ["a FP32 [4] → x"], ["y FP32 [4]"]),
        # states and controls, which no request brings
        (
            "return {'y': x, 'sum': total + x}",
            {"sequence_batching": {"state": [_STATE], "control_input": _CONTROLS}},
            ["x FP32 [4] → x", "total FP32 [4] (state) → total", "END FP32 [1] (control) → END"],
            ["y FP32 [4]", "sum FP32 [4] (state)"],
        ),
        # inputs that are made of the shapes of others
        (
            "return x",
            {
                "input": [_RAGGED],
                "output": [_X | {"name": "y", "dims": [-1]}],
                "batch_input": [_SIZES],
                "batch_output": [_SCATTERED],
            },
            ["x FP32 [-1] → x", "sizes INT32 (BATCH_ELEMENT_COUNT of x) → sizes"],
            ["y FP32 [-1]"],
        ),
    ],
    ids=["options", "another name", "sequences", "batch_input"],
)
def test_report_says_what_the_model_takes_and_gives(
    source: str, document: dict[str, Any], inputs: list[str], outputs: list[str], tmp_path: Path
) -> None:
    report = inspection.inspect(_arguments(tmp_path, source, **document))
    assert (report["inputs"], report["outputs"]) == (inputs, outputs)
    assert report["artifact"] == "model.py: Python source and weights"
    assert report["signature"].startswith("forward(x")
    if "parameters" in document:
        assert report["options"] == {"NUM_THREADS": 1, "WARMUP": True}
        assert report["threads"][0] == 1
    assert json.loads(json.dumps(report)) == report
    warned = ["the input names a are not all arguments"] if inputs[0].startswith("a ") else []
    assert [text.partition(" of ")[0] for text in report["warnings"]] == warned
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert names == ["1", "1/model.py"]  # nothing is written


def test_report_says_what_was_compiled(tmp_path: Path) -> None:
    torch._dynamo.utils.counters.clear()  # of other tests in this process
    parameters = _parameters(TORCH_COMPILE_OPTIONAL_PARAMETERS='{"backend": "eager"}')
    report = inspection.inspect(_arguments(tmp_path, "return x + 1", parameters=parameters))
    assert re.fullmatch(r"2 graphs; the load took \d+\.\d s", report["compiled"])


def test_model_that_loads_and_cannot_run_is_refused(tmp_path: Path) -> None:
    given = _arguments(tmp_path, "return x.missing")
    with pytest.raises(LoadError, match="missing"):
        inspection.inspect(given)
    given = _arguments(tmp_path, "return x.missing", parameters=_parameters(WARMUP="off"))
    assert inspection.inspect(given)["options"]["WARMUP"] is False
