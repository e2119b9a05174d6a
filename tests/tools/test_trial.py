"""One candidate: inputs, comparison with the reference, measurements."""

from __future__ import annotations

import json
import logging
import math
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


@pytest.fixture(autouse=True)
def surroundings(process: None) -> Iterator[None]:
    """Restore the package's log handlers."""
    package = logging.getLogger("torch_py_backend")
    handlers = list(package.handlers)
    yield
    package.handlers = handlers


def _arguments(folder: Path, source: str = _DOUBLE, **document: Any) -> dict[str, str]:
    build.write(folder, "model.py", source)
    return build.arguments(**document) | {"model_repository": str(folder)}


def _prepare(folder: Path, given: dict[str, str], inputs: str | None = None) -> dict[str, Any]:
    (folder / "exchange").mkdir(exist_ok=True)
    return trial.prepare(given, str(folder / "exchange"), inputs)


def _measure(folder: Path, given: dict[str, str], watched: tuple[str, ...] = ()) -> dict[str, Any]:
    return trial.measure(given, str(folder / "exchange"), 0.01, watched, (0, 1, "0-0"))


def test_same_model(tmp_path: Path) -> None:
    """The reference has no error; every batch size is measured."""
    given = _arguments(tmp_path, max_batch_size=6)
    prepared = _prepare(tmp_path, given)
    assert prepared == {"kind": "MODULE", "inputs": "made-up values"}
    measured = _measure(tmp_path, given)
    assert measured["error"] == 0
    assert list(measured["throughput"]) == [1, 2, 4, 6]
    assert all(value > 0 for value in measured["throughput"].values())
    assert 0 < measured["latency_ms"] <= measured["p99_ms"]
    assert measured["memory_mb"] > 0
    assert json.loads(json.dumps(measured))


def test_without_batching(tmp_path: Path) -> None:
    """A model without a batch dimension has one size."""
    given = _arguments(tmp_path, max_batch_size=0)
    _prepare(tmp_path, given)
    assert list(_measure(tmp_path, given)["throughput"]) == [1]


def test_ragged_batches(tmp_path: Path) -> None:
    """With batch_input each row is a request, because a model may count requests."""
    source = _DOUBLE.replace("self, x", "self, x, n").replace(
        "2 * x", "2 * x.reshape(n.shape[0], -1)"
    )
    x = {"name": "x", "data_type": "TYPE_FP32", "dims": [4], "allow_ragged_batch": True}
    made = {"target_name": ["n"], "data_type": "TYPE_INT32", "source_input": ["x"]}
    given = _arguments(tmp_path, source, max_batch_size=4, input=[x], batch_input=[made])
    _prepare(tmp_path, given)
    measured = _measure(tmp_path, given)
    assert measured["error"] == 0
    assert list(measured["throughput"]) == [1, 2, 4]


def test_another_result_is_an_error(tmp_path: Path) -> None:
    """A candidate that differs by a tenth has half of that as error for typical values."""
    given = _arguments(tmp_path)
    _prepare(tmp_path, given)
    measured = _measure(tmp_path, _arguments(tmp_path, _DOUBLE.replace("2 *", "2.2 *")))
    assert 0.05 <= measured["error"] < 0.1


@pytest.mark.parametrize(
    ("parameter", "value"), [("NO_SUCH_SETTING", "1"), ("ENABLE_NVFUSER", "true")]
)
def test_setting_without_effect(tmp_path: Path, parameter: str, value: str) -> None:
    """Settings that are unknown or without effect are refused."""
    _prepare(tmp_path, _arguments(tmp_path))
    given = _arguments(tmp_path, parameters={parameter: {"string_value": value}})
    with pytest.raises(LoadError, match=parameter):
        _measure(tmp_path, given, (parameter,))
    assert _measure(tmp_path, given)["error"] == 0


# --- inputs ------------------------------------------------------------------------------------


def test_inputs_of_a_file(tmp_path: Path) -> None:
    """Inputs of a file are repeated to the number of rows."""
    given = _arguments(tmp_path, max_batch_size=4)
    rows = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 8, 7, 6]])
    save_file({"x": rows}, tmp_path / "real.safetensors")
    assert _prepare(tmp_path, given, str(tmp_path / "real.safetensors"))["inputs"] == (
        "real.safetensors"
    )
    reference = trial._read(tmp_path / "exchange" / "reference_4.pt")
    assert torch.equal(torch.as_tensor(reference["y"]), 2 * rows[[0, 1, 2, 0]])


def test_inputs_of_the_model(tmp_path: Path) -> None:
    """The model's own examples are preferred to made-up values."""
    source = _DOUBLE + "\n\ndef example_inputs():\n    return {'x': 7 * torch.ones(2, 4)}\n"
    given = _arguments(tmp_path, "import torch\n" + source)
    assert _prepare(tmp_path, given)["inputs"] == "example_inputs"
    reference = trial._read(tmp_path / "exchange" / "reference_8.pt")
    assert torch.equal(torch.as_tensor(reference["y"]), torch.full((8, 4), 14.0))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param({"z": torch.ones(1, 4)}, "has z; expected the inputs x", id="name"),
        pytest.param({}, "has no inputs", id="nothing"),
        pytest.param(
            {"x": torch.ones(1, 4), "z": torch.ones(1)}, "has x, z; expected", id="one-too-many"
        ),
        pytest.param({"x": torch.ones(4)}, "float32 [4]; expected one row at least", id="rows"),
        pytest.param({"x": torch.ones(0, 4)}, "float32 [0, 4]", id="no-rows"),
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


@pytest.mark.parametrize("content", [b"", b"PK", b"\x10\0\0\0\0\0\0\0{}"])
def test_damaged_inputs(tmp_path: Path, content: bytes) -> None:
    """A file that is not safetensors is refused."""
    (tmp_path / "real.safetensors").write_bytes(content)
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
    assert _measure(tmp_path, given)["error"] == 0


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
        difference = trial._difference(
            "digits", "y", torch.tensor(actual, dtype=dtype), torch.tensor(expected, dtype=dtype)
        )
        assert difference == pytest.approx(error, rel=1e-3)


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
    assert trial._difference("digits", "y", actual, expected) == error


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
        trial._difference("digits", "y", torch.tensor(actual), torch.tensor(expected))
