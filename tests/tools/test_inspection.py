"""A model tried without a server: what is reported of it, and what is refused."""

from __future__ import annotations

import json
import logging
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build
import pytest
import torch
from safetensors.torch import save_file

from torch_py_backend.errors import LoadError
from torch_py_backend.tools import trial

_MODEL = """
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
    """Puts back the package's log handlers, and forgets the models' modules."""
    package = logging.getLogger("torch_py_backend")
    handlers = list(package.handlers)
    yield
    package.handlers = handlers
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def _parameters(**values: str) -> dict[str, Any]:
    return {key: {"string_value": value} for key, value in values.items()}


def _inspect(folder: Path, source: str = _MODEL, **document: Any) -> dict[str, Any]:
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
    _save_weights(tmp_path)
    report = _inspect(tmp_path, parameters=_parameters(NUM_THREADS="1", WARMUP="true"))
    assert report["artifact"] == "model.py: Python source and weights"
    assert "forward(x" in report["signature"]
    assert report["inputs"] == ["x FP32 [4] → x"]
    assert report["binding"] == "by argument name"
    assert report["outputs"] == ["y FP32 [3]"]
    assert report["max_batch_size"] == 8
    assert report["options"] == {"NUM_THREADS": 1, "WARMUP": True}
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
    assert any("INPUT__1, INPUT0 are not all arguments" in one for one in report["warnings"])


def test_states_are_told(tmp_path: Path) -> None:
    """Who reads the report sees what no request brings."""
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

    found = _inspect(tmp_path, source, sequence_batching=batching, output=[y])

    assert found["inputs"] == [
        "x FP32 [4] → x",
        "total FP32 [4] (state) → total",
        "END FP32 [1] (control) → END",
    ]
    assert found["outputs"] == ["y FP32 [4]", "sum FP32 [4] (state)"]


def test_batch_inputs_are_told(tmp_path: Path) -> None:
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


def test_report_is_json(tmp_path: Path) -> None:
    """The report survives the way through JSON unchanged, options with objects in them, too."""
    _save_weights(tmp_path, out=2)
    y = {"name": "y", "data_type": "TYPE_FP32", "dims": [2]}
    report = _inspect(tmp_path, output=[y], parameters=_parameters(MODEL_KWARGS='{"out": 2}'))
    assert json.loads(json.dumps(report)) == report
    assert report["options"] == {"MODEL_KWARGS": {"out": 2}}


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
    source = _MODEL.replace("self.linear(x)", "self.linear(x).missing")
    with pytest.raises(LoadError, match=r"model 'digits': .*missing"):
        _inspect(tmp_path, source, parameters=_parameters(WEIGHTS="none"))
    report = _inspect(tmp_path, source, parameters=_parameters(WEIGHTS="none", WARMUP="off"))
    assert report["options"]["WARMUP"] is False


@pytest.mark.parametrize(
    ("source", "document", "says"),
    [
        pytest.param("import nowhere\n", {}, "No module named 'nowhere'", id="import"),
        pytest.param("def broken(:\n", {}, "line 1: SyntaxError", id="syntax"),
        pytest.param(_MODEL, {"input": []}, "lists no input", id="no-inputs"),
        pytest.param(
            _MODEL, {"parameters": _parameters(WARMUP="maybe")}, "WARMUP is 'maybe'", id="option"
        ),
        pytest.param(
            _MODEL, {}, "Net has 2 weights, and there is no weights file", id="no-weights"
        ),
        pytest.param(
            _MODEL,
            {
                "parameters": _parameters(WEIGHTS="none"),
                "sequence_batching": {"iterative_sequence": True},
            },
            "iterative_sequence",
            id="unsupported",
        ),
        pytest.param(
            _MODEL,
            {
                "parameters": _parameters(WEIGHTS="none"),
                "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [5]}],
            },
            "expected float32 [-1, 5]",
            id="contradiction",
        ),
    ],
)
def test_refused(tmp_path: Path, source: str, document: dict[str, Any], says: str) -> None:
    """What would not be served is refused here with the sentence that the server would show."""
    with pytest.raises(LoadError) as refusal:
        _inspect(tmp_path, source, **document)
    assert says in str(refusal.value)
    assert "model 'digits'" in str(refusal.value)


def test_nothing_is_written(tmp_path: Path) -> None:
    """A model folder may be read-only: trying the model leaves it as it was."""
    build.write(tmp_path, "helper.py", "OUT = 3\n")
    source = "import helper\n" + _MODEL
    _inspect(tmp_path, source, parameters=_parameters(WEIGHTS="none"))
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert names == ["1", "1/helper.py", "1/model.py"]


def test_fallback_is_told(tmp_path: Path) -> None:
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
