"""A model that is loaded without a server: its report, a comparison, measurements."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build
import models
import pytest
import torch
from safetensors.torch import save_file

from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import LoadError
from torch_py_backend.model_folders import inspection, measurement, tuning
from torch_py_backend.values import Item


def _module(result: str, takes: str = "x") -> str:
    return (
        "import time\nimport torch\n\n\nclass Net(torch.nn.Module):\n"
        f"    def forward(self, {takes}):\n        return {result}\n"
    )


_DOUBLE = _module("2 * x")
_LINEAR = """
from torch import nn


class Net(nn.Module):
    def __init__(self, out=3):
        super().__init__()
        self.linear = nn.Linear(4, out)

    def forward(self, x):
        return self.linear(x)
"""
_X = {"name": "x", "data_type": "TYPE_FP32", "dims": [4]}
_RAGGED = _X | {"dims": [-1], "allow_ragged_batch": True}
_SIZES = {"target_name": ["sizes"], "data_type": "TYPE_INT32", "source_input": ["x"]}


@pytest.fixture(autouse=True)
def surroundings(process: None, tmp_path: Path) -> Iterator[None]:
    """Restore the package's log handlers, and forget the models' modules."""
    package = logging.getLogger("torch_py_backend")
    handlers = list(package.handlers)
    yield
    package.handlers, package.propagate = handlers, True
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def _arguments(folder: Path, source: str = _DOUBLE, **document: Any) -> dict[str, str]:
    build.write(folder, "model.py", source)
    return build.arguments(**document) | {"model_repository": str(folder)}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Item]:
    """The batches that are measured; each measurement is one call."""
    batches: list[Item] = []

    def recorded(engine: Engine, item: Item) -> Item:
        batches.append(item)
        return inspection.run(engine, item)

    monkeypatch.setattr(measurement, "run", recorded)
    monkeypatch.setattr(measurement, "_SECONDS", 0.0)
    return batches


@pytest.mark.parametrize(("size", "rows"), [(6, 6), (0, 1)])
def test_same_model(tmp_path: Path, size: int, rows: int, measured: list[Item]) -> None:
    """Figures of one row and of a full batch; the same model has no error."""
    given = _arguments(tmp_path, max_batch_size=size)
    figures = measurement.measure(given, given, rows)
    assert (figures.pop("kind"), figures.pop("error")) == ("MODULE", 0)
    assert figures.pop("spread") >= 0
    assert min(figures.values()) > 0
    assert tuning.Row(tuning.AS_CONFIGURED, **figures).cores > 0
    shapes = {tuple(batch["x"].shape) for batch in measured}
    assert shapes == ({(1, 4), (6, 4)} if size else {(4,)})


def test_another_result_is_an_error(tmp_path: Path, measured: list[Item]) -> None:
    """The error is relative to the outputs of the model as configured."""
    configured = _arguments(tmp_path)
    candidate = _arguments(tmp_path / "other", _module("2.2 * x"))
    figures = measurement.measure(candidate, configured, 8)
    assert figures["error"] == pytest.approx(0.1, rel=0.2)


def test_inputs(tmp_path: Path, measured: list[Item]) -> None:
    """The model's example is repeated to the number of rows."""
    rows = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 8, 7, 6]])
    given = _arguments(tmp_path)
    save_file({"x": rows}, tmp_path / "1" / "example_inputs.safetensors")
    measurement.measure(given, given, 4)
    assert torch.equal(torch.as_tensor(measured[-1]["x"]), rows[[0, 1, 2, 0]])


@pytest.mark.parametrize("kind", ["strings", "ragged"])
def test_other_inputs(tmp_path: Path, kind: str, measured: list[Item]) -> None:
    """Strings and ragged batches are passed to both models and compared."""
    if kind == "strings":
        string = {"data_type": "TYPE_STRING", "dims": [2]}
        document = {"input": [{"name": "blobs", **string}], "output": [{"name": "y", **string}]}
        given = _arguments(tmp_path, models.source(models.Blobs), max_batch_size=2, **document)
    else:
        given = _arguments(
            tmp_path,
            _module("2 * x.reshape(sizes.shape[0], -1)", "x, sizes"),
            input=[{**_RAGGED, "dims": [4]}],
            batch_input=[_SIZES],
            max_batch_size=2,
        )
    assert measurement.measure(given, given, 2)["error"] == 0


# --- the report --------------------------------------------------------------------------------


def _parameters(**values: str) -> dict[str, Any]:
    return {key: {"string_value": value} for key, value in values.items()}


def _inspect(folder: Path, source: str = _LINEAR, **document: Any) -> dict[str, Any]:
    build.write(folder, "model.py", source)
    y = _X | {"name": "y", "dims": [3]}
    given = build.arguments(**{"output": [y], **document})
    return inspection.inspect(given | {"model_repository": str(folder)})


def _save_weights(folder: Path, out: int = 3) -> None:
    (folder / "1").mkdir()
    state = {"linear.weight": torch.zeros(out, 4), "linear.bias": torch.zeros(out)}
    save_file(state, folder / "1" / "model.safetensors")


def test_report(tmp_path: Path) -> None:
    """The report names the artifact, what it takes and gives, and the options that were set."""
    _save_weights(tmp_path, out=2)
    y = _X | {"name": "y", "dims": [2]}
    options = _parameters(NUM_THREADS="1", WARMUP="true", MODEL_KWARGS='{"out": 2}')
    report = _inspect(tmp_path, output=[y], parameters=options)
    assert report["artifact"] == "model.py: Python source and weights"
    assert "forward(x" in report["signature"]
    assert report["inputs"] == ["x FP32 [4] → x"]
    assert report["binding"] == "by argument name"
    assert report["outputs"] == ["y FP32 [2]"]
    assert report["max_batch_size"] == 8
    assert report["options"] == {"NUM_THREADS": 1, "WARMUP": True, "MODEL_KWARGS": {"out": 2}}
    assert json.loads(json.dumps(report)) == report
    assert report["threads"]["intra_op"] == 1
    assert report["warnings"] == []


def test_rule_of_names(tmp_path: Path) -> None:
    """The report says what ties names to arguments, and warns of TorchScript's liberties."""

    class Net(torch.nn.Module):
        def forward(self, INPUT0: torch.Tensor, INPUT1: torch.Tensor) -> torch.Tensor:
            return INPUT0 - 2 * INPUT1

    (tmp_path / "1").mkdir()
    torch.jit.script(Net()).save(tmp_path / "1" / "model.pt")
    given = build.arguments(
        input=[_X | {"name": "INPUT__1"}, _X | {"name": "INPUT0"}],
        output=[_X | {"name": "y", "dims": [5]}],
    )
    report = inspection.inspect(given | {"model_repository": str(tmp_path)})
    assert report["binding"] == "in the config's order"
    assert report["inputs"] == ["INPUT__1 FP32 [4] → INPUT0", "INPUT0 FP32 [4] → INPUT1"]
    order, dims = report["warnings"]
    assert "INPUT__1, INPUT0 are not all arguments" in order
    assert "output 'y' is [8, 4], and config.pbtxt says [-1, 5]" in dims


def test_states(tmp_path: Path) -> None:
    """The report names states and controls, which no request brings."""
    source = _module("{'y': x, 'sum': total + x}", "x, total, END")
    state = {"input_name": "total", "output_name": "sum", "data_type": "TYPE_FP32", "dims": [4]}
    controls = [
        {"name": name, "control": [{"fp32_false_true": [0, 1]}]} for name in ("START", "END")
    ]
    batching = {"state": [state], "control_input": controls}
    report = _inspect(tmp_path, source, sequence_batching=batching, output=[_X | {"name": "y"}])
    assert report["inputs"] == [
        "x FP32 [4] → x",
        "total FP32 [4] (state) → total",
        "END FP32 [1] (control) → END",
    ]
    assert report["outputs"] == ["y FP32 [4]", "sum FP32 [4] (state)"]


def test_batch_inputs(tmp_path: Path) -> None:
    """The report says which inputs are made of the shapes of others."""
    report = _inspect(
        tmp_path,
        _module("x", "x, sizes"),
        input=[_RAGGED],
        output=[_X | {"name": "y", "dims": [-1]}],
        batch_input=[_SIZES],
        batch_output=[{"target_name": ["y"], "source_input": ["x"]}],
    )
    assert report["inputs"] == [
        "x FP32 [-1] → x",
        "sizes INT32 (BATCH_ELEMENT_COUNT of x) → sizes",
    ]
    assert report["outputs"] == ["y FP32 [-1]"]


def test_warnings(tmp_path: Path) -> None:
    """What the package warns about is part of the report, once, and goes nowhere else."""
    elsewhere: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = elsewhere.append  # type: ignore[assignment,method-assign]
    logging.getLogger().addHandler(handler)
    try:
        report = _inspect(
            tmp_path, parameters=_parameters(WEIGHTS="none", NUM_THREAD="2", ENABLE_NVFUSER="true")
        )
    finally:
        logging.getLogger().removeHandler(handler)
    unknown, inert = report["warnings"]
    assert "NUM_THREAD is unknown" in unknown
    assert "Did you mean NUM_THREADS?" in unknown
    assert "ENABLE_NVFUSER has no effect" in inert
    assert elsewhere == []


def test_warmup_shows_what_loading_does_not(tmp_path: Path) -> None:
    """A model that loads and cannot run is refused; with WARMUP off it only loads."""
    source = _LINEAR.replace("self.linear(x)", "self.linear(x).missing")
    with pytest.raises(LoadError, match="missing"):
        _inspect(tmp_path, source, parameters=_parameters(WEIGHTS="none"))
    report = _inspect(tmp_path, source, parameters=_parameters(WEIGHTS="none", WARMUP="off"))
    assert report["options"]["WARMUP"] is False


def test_nothing_is_written(tmp_path: Path) -> None:
    """A model folder may be read-only: trying the model leaves it as it was."""
    build.write(tmp_path, "helper.py", "OUT = 3\n")
    source = "import helper\n" + _LINEAR
    _inspect(tmp_path, source, parameters=_parameters(WEIGHTS="none"))
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert names == ["1", "1/helper.py", "1/model.py"]
