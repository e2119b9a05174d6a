"""A model that is loaded without a server: its report, a comparison, measurements."""

from __future__ import annotations

import json
import logging
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build
import models
import pytest
import torch
from safetensors.torch import save, save_file

from torch_py_backend.errors import LoadError
from torch_py_backend.tools import trial


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
        assert figures["p99_ms"] >= figures["latency_ms"]
        assert json.loads(json.dumps([load, figures]))


def test_batch_that_takes_long(tmp_path: Path) -> None:
    """A full batch has fewer rows than max_batch_size if calls with more of them take long."""
    source = _module("(time.sleep(x.shape[0] > 2), 2 * x)[1]")
    assert _prepare(tmp_path, _arguments(tmp_path, source, max_batch_size=64))["batch"] == 2


def test_batches_within_a_limit(tmp_path: Path) -> None:
    """A full batch takes no longer than that; batches of any other size can be measured."""
    source = _module("(time.sleep(0.02 * x.shape[0]), 2 * x)[1]")
    given = _arguments(tmp_path, source, max_batch_size=64)
    (tmp_path / "exchange").mkdir()
    batch = trial.prepare(given, str(tmp_path / "exchange"), None, 0.1)["batch"]
    assert batch == 4
    measurement = trial.measure(given, str(tmp_path / "exchange"), batch, ())
    next(measurement)
    assert measurement.send({"rows": 6, "seconds": 0.01})["p99_ms"] >= 120


@pytest.mark.parametrize("others", [(), (2,)])
def test_other_sizes_are_warmed_up(
    tmp_path: Path, others: tuple[int, ...], caplog: pytest.LogCaptureFixture, dynamo: None
) -> None:
    """A size that is measured later has its graph, as in a server; without it, it runs eagerly."""
    static = _parameters(
        TORCH_COMPILE_OPTIONAL_PARAMETERS='{"backend": "eager", "dynamic": false}',
        BATCH_BUCKETS="auto",
    )
    assert _prepare(tmp_path, _arguments(tmp_path, max_batch_size=8))["batch"] == 8
    given = _arguments(tmp_path, max_batch_size=8, parameters=static)
    measurement = trial.measure(given, str(tmp_path / "exchange"), 8, (), others)
    next(measurement)
    measurement.send({"rows": 2, "seconds": 0.01})
    assert ("were not met in the warm-up" in caplog.text) == (not others)


def test_ragged_batches(tmp_path: Path) -> None:
    """With batch_input each row is a request, because a model may count requests."""
    source = _module("2 * x.reshape(sizes.shape[0], -1)", "x, sizes")
    x = _RAGGED | {"dims": [4]}
    given = _arguments(tmp_path, source, max_batch_size=4, input=[x], batch_input=[_SIZES])
    assert _prepare(tmp_path, given)["batch"] == 4
    assert _load(tmp_path, given, 4)["error"] == 0


def test_another_result_is_an_error(tmp_path: Path) -> None:
    """A candidate that differs by a tenth has half of that as error for typical values."""
    given = _arguments(tmp_path)
    _prepare(tmp_path, given)
    load = _load(tmp_path, _arguments(tmp_path, _module("2.2 * x")))
    assert 0.05 <= load["error"] < 0.1


@pytest.mark.parametrize("parameter", ["NO_SUCH_SETTING", "ENABLE_NVFUSER"])
def test_setting_without_effect(tmp_path: Path, parameter: str) -> None:
    """Settings that are unknown or without effect are refused."""
    _prepare(tmp_path, _arguments(tmp_path))
    given = _arguments(tmp_path, parameters=_parameters(**{parameter: "true"}))
    with pytest.raises(LoadError, match=parameter):
        _load(tmp_path, given, watched=(parameter,))
    assert _load(tmp_path, given)["error"] == 0


# --- inputs ------------------------------------------------------------------------------------


def _reference(folder: Path, rows: int) -> torch.Tensor:
    return torch.as_tensor(trial.read_values(folder / "exchange" / f"reference_{rows}.pt")["y"])


def test_inputs_of_a_file(tmp_path: Path) -> None:
    """Inputs of a file are repeated to the number of rows."""
    given = _arguments(tmp_path, max_batch_size=4)
    rows = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 8, 7, 6]])
    path = tmp_path / "real.safetensors"
    save_file({"x": rows}, path)
    assert _prepare(tmp_path, given, str(path))["inputs"] == "real.safetensors"
    assert torch.equal(_reference(tmp_path, 4), 2 * rows[[0, 1, 2, 0]])


def test_inputs_of_the_model(tmp_path: Path) -> None:
    """The model's own examples are preferred to made-up values."""
    source = _DOUBLE + "\n\ndef example_inputs():\n    return {'x': 7 * torch.ones(2, 4)}\n"
    assert _prepare(tmp_path, _arguments(tmp_path, source))["inputs"] == "example_inputs"
    assert torch.equal(_reference(tmp_path, 8), torch.full((8, 4), 14.0))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"z": torch.ones(1, 4)}, "has z; expected the inputs x"),
        ({}, "has no inputs"),
        ({"x": torch.ones(4)}, "float32 [4]; expected one row at least"),
        ({"x": torch.ones(2, 5)}, "[2, 5]; expected one row at least of x"),
        ({"x": torch.ones(2, 4).int()}, "is int32 [2, 4]"),
        (None, "real.safetensors is not valid safetensors"),
    ],
    ids=["name", "nothing", "rows", "dims", "type", "damaged"],
)
def test_inputs_that_do_not_fit(
    tmp_path: Path, content: dict[str, torch.Tensor] | None, says: str
) -> None:
    """Inputs that do not fit the config are refused, and a file that is not safetensors."""
    path = tmp_path / "real.safetensors"
    path.write_bytes(b"PK" if content is None else save(content))
    with pytest.raises(LoadError) as refusal:
        _prepare(tmp_path, _arguments(tmp_path), str(path))
    assert says in str(refusal.value)


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


# --- the report --------------------------------------------------------------------------------


def _parameters(**values: str) -> dict[str, Any]:
    return {key: {"string_value": value} for key, value in values.items()}


def _inspect(folder: Path, source: str = _LINEAR, **document: Any) -> dict[str, Any]:
    build.write(folder, "model.py", source)
    y = _X | {"name": "y", "dims": [3]}
    given = build.arguments(**{"output": [y], **document})
    return trial.inspect(given | {"model_repository": str(folder)})


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
    report = trial.inspect(given | {"model_repository": str(tmp_path)})
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
