"""A model that is loaded without a server: its report, a comparison, measurements."""

from __future__ import annotations

import json
import logging
import math
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build
import models
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from torch_py_backend.errors import ArtifactError, ConfigError, LoadError, OutputError
from torch_py_backend.tools import trial

_DOUBLE = """
from torch import nn


class Double(nn.Module):
    def forward(self, x):
        return 2 * x
"""


_LINEAR = """
from torch import nn


class Net(nn.Module):
    def __init__(self, out=3):
        super().__init__()
        self.linear = nn.Linear(4, out)

    def forward(self, x):
        return self.linear(x)
"""


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


def _prepare(folder: Path, given: dict[str, str], inputs: str | None = None) -> dict[str, Any]:
    (folder / "exchange").mkdir(exist_ok=True)
    return trial.prepare(given, str(folder / "exchange"), inputs)


def _load(
    folder: Path, given: dict[str, str], batch: int = 8, watched: tuple[str, ...] = ()
) -> dict[str, float]:
    return next(trial.measure(given, str(folder / "exchange"), batch, watched))


@pytest.mark.parametrize(("size", "batch"), [(6, 6), (0, 1)])
def test_same_model(tmp_path: Path, size: int, batch: int) -> None:
    """The reference has no error; one row and full batches are measured, as often as asked."""
    given = _arguments(tmp_path, max_batch_size=size)
    prepared = _prepare(tmp_path, given)
    assert prepared == {"kind": "MODULE", "inputs": "made-up values", "batch": batch}
    measurement = trial.measure(given, str(tmp_path / "exchange"), batch, ())
    load = next(measurement)
    assert load["error"] == 0
    assert load["memory_mb"] > 0
    for rows in (1, batch, 1):
        figures = measurement.send({"rows": rows, "seconds": 0.01})
        assert figures["latency_ms"] > 0
        assert figures["throughput"] > 0
        assert json.loads(json.dumps([load, figures]))


def test_batch_that_takes_long(tmp_path: Path) -> None:
    """A full batch has fewer rows than max_batch_size if calls with more of them take long."""
    source = _DOUBLE.replace("return", "time.sleep(x.shape[0] > 2); return")
    given = _arguments(tmp_path, "import time\n" + source, max_batch_size=64)
    assert _prepare(tmp_path, given)["batch"] == 2


def test_ragged_batches(tmp_path: Path) -> None:
    """With batch_input each row is a request, because a model may count requests."""
    source = _DOUBLE.replace("self, x", "self, x, n").replace(
        "2 * x", "2 * x.reshape(n.shape[0], -1)"
    )
    x = {"name": "x", "data_type": "TYPE_FP32", "dims": [4], "allow_ragged_batch": True}
    made = {"target_name": ["n"], "data_type": "TYPE_INT32", "source_input": ["x"]}
    given = _arguments(tmp_path, source, max_batch_size=4, input=[x], batch_input=[made])
    assert _prepare(tmp_path, given)["batch"] == 4
    assert _load(tmp_path, given, 4)["error"] == 0


def test_another_result_is_an_error(tmp_path: Path) -> None:
    """A candidate that differs by a tenth has half of that as error for typical values."""
    given = _arguments(tmp_path)
    _prepare(tmp_path, given)
    load = _load(tmp_path, _arguments(tmp_path, _DOUBLE.replace("2 *", "2.2 *")))
    assert 0.05 <= load["error"] < 0.1


@pytest.mark.parametrize(
    ("parameter", "value"), [("NO_SUCH_SETTING", "1"), ("ENABLE_NVFUSER", "true")]
)
def test_setting_without_effect(tmp_path: Path, parameter: str, value: str) -> None:
    """Settings that are unknown or without effect are refused."""
    _prepare(tmp_path, _arguments(tmp_path))
    given = _arguments(tmp_path, parameters={parameter: {"string_value": value}})
    with pytest.raises(LoadError, match=parameter):
        _load(tmp_path, given, watched=(parameter,))
    assert _load(tmp_path, given)["error"] == 0


# --- inputs ------------------------------------------------------------------------------------


def test_inputs_of_a_file(tmp_path: Path) -> None:
    """Inputs of a file are repeated to the number of rows."""
    given = _arguments(tmp_path, max_batch_size=4)
    rows = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 8, 7, 6]])
    save_file({"x": rows}, tmp_path / "real.safetensors")
    assert _prepare(tmp_path, given, str(tmp_path / "real.safetensors"))["inputs"] == (
        "real.safetensors"
    )
    reference = trial.read_values(tmp_path / "exchange" / "reference_4.pt")
    assert torch.equal(torch.as_tensor(reference["y"]), 2 * rows[[0, 1, 2, 0]])


def test_inputs_of_the_model(tmp_path: Path) -> None:
    """The model's own examples are preferred to made-up values."""
    source = _DOUBLE + "\n\ndef example_inputs():\n    return {'x': 7 * torch.ones(2, 4)}\n"
    given = _arguments(tmp_path, "import torch\n" + source)
    assert _prepare(tmp_path, given)["inputs"] == "example_inputs"
    reference = trial.read_values(tmp_path / "exchange" / "reference_8.pt")
    assert torch.equal(torch.as_tensor(reference["y"]), torch.full((8, 4), 14.0))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param({"z": torch.ones(1, 4)}, "has z; expected the inputs x", id="name"),
        pytest.param({}, "has no inputs", id="nothing"),
        pytest.param({"x": torch.ones(4)}, "float32 [4]; expected one row at least", id="rows"),
        pytest.param({"x": torch.ones(2, 5)}, "[2, 5]; expected one row at least of x", id="dims"),
        pytest.param({"x": torch.ones(2, 4).int()}, "is int32 [2, 4]", id="type"),
    ],
)
def test_inputs_that_do_not_fit(tmp_path: Path, content: dict[str, Any], says: str) -> None:
    """Inputs that do not fit the config are refused."""
    path = tmp_path / "real.safetensors"
    save_file(content, path)
    with pytest.raises(ConfigError) as refusal:
        _prepare(tmp_path, _arguments(tmp_path), str(path))
    assert says in str(refusal.value)


def test_damaged_inputs(tmp_path: Path) -> None:
    """A file that is not safetensors is refused."""
    (tmp_path / "real.safetensors").write_bytes(b"PK")
    with pytest.raises(ArtifactError, match=r"the inputs in real\.safetensors cannot be read"):
        _prepare(tmp_path, _arguments(tmp_path), str(tmp_path / "real.safetensors"))


def test_strings(tmp_path: Path) -> None:
    """Strings are passed to the candidate and compared."""
    string = {"data_type": "TYPE_STRING", "dims": [2]}
    given = _arguments(
        tmp_path,
        models.source(models.Blobs),
        input=[{"name": "blobs", **string}],
        output=[{"name": "y", **string}],
        max_batch_size=2,
    )
    _prepare(tmp_path, given)
    assert _load(tmp_path, given, 2)["error"] == 0


# --- comparison --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        pytest.param([1.0, 2.0], [1.0, 2.0], 0.0, id="equal"),
        pytest.param([1.1, 1.0], [1.0, 1.0], 0.05, id="beside-its-typical-value"),
        pytest.param([1e-4, 1.0, 1.0], [0.0, 1.0, 1.0], 1e-4, id="close-to-zero"),
        pytest.param([-1e9, 1.0, 1.5], [-1e9, 1.0, 1.0], 0.25, id="beside-a-mask"),
        pytest.param([math.inf, 1.0], [math.inf, 1.0], 0.0, id="infinity"),
        pytest.param([math.nan, 1.0], [math.nan, 1.0], 0.0, id="nan"),
        pytest.param([0.5, 0.0], [0.0, 0.0], 0.5, id="beside-zeros"),
        pytest.param([], [], 0.0, id="empty"),
        pytest.param([math.nan], [math.nan], 0.0, id="nothing-finite"),
    ],
)
def test_difference(actual: list[float], expected: list[float], error: float) -> None:
    """Neither values close to zero nor large values distort the error."""
    for dtype in (torch.float32, torch.float64):
        error_of_output = trial.difference(
            "digits", "y", torch.tensor(actual, dtype=dtype), torch.tensor(expected, dtype=dtype)
        )
        assert error_of_output == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        pytest.param(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 9]), 0.25, id="integers"),
        pytest.param(torch.tensor([True]), torch.tensor([False]), 1.0, id="booleans"),
        pytest.param(
            np.array(["a", "ü"], dtype=object),
            np.array([b"a", "ü".encode()], dtype=object),
            0.0,
            id="strings",
        ),
        pytest.param(
            np.array(["a", "b"], dtype=object), np.array(["a", "c"], dtype=object), 0.5, id="text"
        ),
    ],
)
def test_share_that_differs(actual: Any, expected: Any, error: float) -> None:
    """The error of integers, booleans and strings is the share that differs."""
    assert trial.difference("digits", "y", actual, expected) == error


@pytest.mark.parametrize(
    ("actual", "expected", "says"),
    [
        pytest.param([1.0], [1.0, 2.0], r"is \[1\]; expected \[2\]", id="shape"),
        pytest.param([math.nan, 1.0], [1.0, 1.0], "infinities or NaN", id="nan"),
        pytest.param([math.inf], [-math.inf], "infinities or NaN", id="sign"),
        pytest.param([1.0], [math.nan], "infinities or NaN", id="number"),
        pytest.param([math.nan], [math.inf], "infinities or NaN", id="nan-for-infinity"),
    ],
)
def test_outputs_that_cannot_be_compared(
    actual: list[float], expected: list[float], says: str
) -> None:
    """Another shape, or NaN in other places than eager, is refused."""
    with pytest.raises(OutputError, match=says):
        trial.difference("digits", "y", torch.tensor(actual), torch.tensor(expected))


# --- the report --------------------------------------------------------------------------------


def _parameters(**values: str) -> dict[str, Any]:
    return {key: {"string_value": value} for key, value in values.items()}


def _inspect(folder: Path, source: str = _LINEAR, **document: Any) -> dict[str, Any]:
    build.write(folder, "model.py", source)
    y = {"name": "y", "data_type": "TYPE_FP32", "dims": [3]}
    given = build.arguments(**{"output": [y], **document})
    return trial.inspect(given | {"model_repository": str(folder)})


def _save_weights(folder: Path, out: int = 3) -> None:
    (folder / "1").mkdir()
    state = {"linear.weight": torch.zeros(out, 4), "linear.bias": torch.zeros(out)}
    save_file(state, folder / "1" / "model.safetensors")


def test_report(tmp_path: Path) -> None:
    """The report names the artifact, what it takes and gives, and the options that were set."""
    _save_weights(tmp_path, out=2)
    y = {"name": "y", "data_type": "TYPE_FP32", "dims": [2]}
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
    """The report says what ties names to arguments, and warns where only the order does."""

    class Net(torch.nn.Module):
        def forward(self, INPUT0: torch.Tensor, INPUT1: torch.Tensor) -> torch.Tensor:
            return INPUT0 - 2 * INPUT1

    (tmp_path / "1").mkdir()
    torch.jit.script(Net()).save(tmp_path / "1" / "model.pt")
    x = {"data_type": "TYPE_FP32", "dims": [4]}
    given = build.arguments(input=[{"name": "INPUT__1", **x}, {"name": "INPUT0", **x}])

    report = trial.inspect(given | {"model_repository": str(tmp_path)})

    assert report["binding"] == "in the config's order"
    assert report["inputs"] == ["INPUT__1 FP32 [4] → INPUT0", "INPUT0 FP32 [4] → INPUT1"]
    assert any("INPUT__1, INPUT0 are not all arguments" in text for text in report["warnings"])


def test_states(tmp_path: Path) -> None:
    """The report names states and controls, which no request brings."""
    source = (
        "from torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def forward(self, x, total, END):\n"
        "        return {'y': x, 'sum': total + x}\n"
    )
    state = {"input_name": "total", "output_name": "sum", "data_type": "TYPE_FP32", "dims": [4]}
    controls = [
        {"name": name, "control": [{"fp32_false_true": [0, 1]}]} for name in ("START", "END")
    ]
    batching = {"state": [state], "control_input": controls}
    y = {"name": "y", "data_type": "TYPE_FP32", "dims": [4]}

    report = _inspect(tmp_path, source, sequence_batching=batching, output=[y])

    assert report["inputs"] == [
        "x FP32 [4] → x",
        "total FP32 [4] (state) → total",
        "END FP32 [1] (control) → END",
    ]
    assert report["outputs"] == ["y FP32 [4]", "sum FP32 [4] (state)"]


def test_batch_inputs(tmp_path: Path) -> None:
    """The report says which inputs are made of the shapes of others."""
    source = (
        "from torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def forward(self, x, sizes):\n"
        "        return x\n"
    )
    x = {"name": "x", "data_type": "TYPE_FP32", "dims": [-1], "allow_ragged_batch": True}
    made = {"target_name": ["sizes"], "data_type": "TYPE_INT32", "source_input": ["x"]}
    split = {"target_name": ["y"], "source_input": ["x"]}
    y = {"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}

    report = _inspect(
        tmp_path, source, input=[x], output=[y], batch_input=[made], batch_output=[split]
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
    with pytest.raises(LoadError, match=r"model 'digits': .*missing"):
        _inspect(tmp_path, source, parameters=_parameters(WEIGHTS="none"))
    report = _inspect(tmp_path, source, parameters=_parameters(WEIGHTS="none", WARMUP="off"))
    assert report["options"]["WARMUP"] is False


@pytest.mark.parametrize(
    ("source", "parameters", "says"),
    [
        ("import nowhere\n", {}, "No module named 'nowhere'"),
        (_LINEAR, {"WARMUP": "maybe"}, "WARMUP is 'maybe'"),
        (_LINEAR, {}, "Net has 2 weights, and there is no weights file"),
    ],
    ids=["import", "option", "no-weights"],
)
def test_refused(tmp_path: Path, source: str, parameters: dict[str, str], says: str) -> None:
    """A model that would not be served is refused with the message of the server."""
    with pytest.raises(LoadError) as refusal:
        _inspect(tmp_path, source, parameters=_parameters(**parameters))
    assert says in str(refusal.value)
    assert "model 'digits'" in str(refusal.value)


def test_nothing_is_written(tmp_path: Path) -> None:
    """A model folder may be read-only: trying the model leaves it as it was."""
    build.write(tmp_path, "helper.py", "OUT = 3\n")
    source = "import helper\n" + _LINEAR
    _inspect(tmp_path, source, parameters=_parameters(WEIGHTS="none"))
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert names == ["1", "1/helper.py", "1/model.py"]


def test_fallback(tmp_path: Path) -> None:
    """Where a package was built for another machine, the report names what is served instead."""
    _save_weights(tmp_path)
    with zipfile.ZipFile(tmp_path / "1" / "model.pt2", "w") as package:
        package.writestr(
            "model/data/aotinductor/model/x_metadata.json", '{"AOTI_MACHINE": "another"}'
        )
    parameters = _parameters(FALLBACK="model.py")
    report = _inspect(tmp_path, default_model_filename="model.pt2", parameters=parameters)
    assert report["artifact"] == "model.py: Python source and weights"
    assert any("was built for processor another" in text for text in report["warnings"])
