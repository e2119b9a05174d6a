"""Completing a config from its model."""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
from typing import Any

import build
import pytest

from torch_py_backend.autocomplete import completion
from torch_py_backend.errors import ConfigError, LoadError
from torch_py_backend.processes import child_process

Entry = dict[str, Any]


def _tensor(name: str, data_type: str | None = "TYPE_FP32", dims: list[int] | None = None) -> Entry:
    """Return an entry of Triton's JSON, in which fields that config.pbtxt lacks are empty."""
    return {"name": name, "data_type": data_type or "TYPE_INVALID", "dims": dims or []}


_X, _MASK = _tensor("x", dims=[4]), _tensor("mask", "TYPE_BOOL", [-1])
_Y, _Z = _tensor("y", dims=[3]), _tensor("z", "TYPE_STRING", [1])
_BATCHED = {"input": [_X, _MASK], "output": [_Y, _Z], "max_batch_size": 8}
_SINGLE = {**_BATCHED, "max_batch_size": 0}
_ROWS = {
    "input": [_tensor("x", dims=[2, 4])],
    "output": [_tensor("y", dims=[2, 3])],
    "max_batch_size": 0,
}


class _Model:
    """Replaces the child process: returns a schema and records its arguments."""

    def __init__(self, schema: Entry) -> None:
        self.schema = schema
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> Entry:
        self.calls.append(arguments)
        return copy.deepcopy(self.schema)


def _complete(monkeypatch: pytest.MonkeyPatch, schema: Entry, **written: Any) -> Entry:
    monkeypatch.setattr(child_process, "run", _Model(schema))
    arguments = build.arguments(**({"max_batch_size": 0, "input": [], "output": []} | written))
    document: Entry = json.loads(arguments["model_config"])
    completion.complete(arguments, document)
    return document


# --- whether the model is run ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "incomplete"),
    [
        ({"input": [_X, _MASK], "output": [_Y, _Z]}, False),
        ({"input": [_X], "output": []}, True),
        ({"output": [_Y]}, True),
        ({"input": [_X, _tensor("m")], "output": [_Y]}, True),
        ({"input": [_tensor("x", None, [4])], "output": [_Y]}, True),
        ({"input": [{"name": "x"}], "output": [_Y]}, True),
    ],
)
def test_incomplete(document: Entry, incomplete: bool) -> None:
    """A config is incomplete if inputs or outputs are missing, or one lacks its type or dims."""
    assert completion.is_incomplete(document) is incomplete


_ADAPTER = """
import importlib.machinery
import json
import math
import re
import sys
import types



class Installed:
    # torch is there, and an import of it fails.

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "torch" else None

    def create_module(self, spec):
        raise AssertionError("torch was imported")


sys.meta_path.insert(0, Installed())
utils = types.ModuleType("triton_python_backend_utils")
utils.get_model_dir = lambda: "/models/digits/1"
sys.modules["triton_python_backend_utils"] = utils
from torch_py_backend.processes import child_process
from torch_py_backend.adapter import TritonPythonModel


def run(*args):
    raise AssertionError("a child was started")


class Config:
    def as_dict(self):
        return json.loads(sys.argv[1])


child_process.run = run
config = Config()
assert TritonPythonModel.auto_complete_config(config) is config
"""


def test_complete_config_starts_no_child() -> None:
    """A complete config starts no child process and does not import torch."""
    document = build.arguments()["model_config"]
    finished = subprocess.run(
        [sys.executable, "-c", _ADAPTER, document], capture_output=True, text=True, check=False
    )
    assert finished.stderr == ""
    assert finished.returncode == 0


@pytest.mark.parametrize(("seconds", "limit"), [(math.inf, 600), (5.5, 5.5)])
def test_arguments_of_the_child_process(
    monkeypatch: pytest.MonkeyPatch, seconds: float, limit: float
) -> None:
    """The child process gets Triton's arguments, and the smaller one of two time limits."""
    model = _Model(_BATCHED)
    monkeypatch.setattr(child_process, "run", model)
    arguments = build.arguments(input=[], output=[])
    completion.complete(arguments, json.loads(arguments["model_config"]), seconds)
    target = "torch_py_backend.autocomplete.schema:describe"
    assert model.calls == [(build.MODEL, target, {"arguments": arguments}, limit)]


def test_errors_of_the_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the child process is raised again, and the config is unchanged."""

    def fail(*args: Any) -> Any:
        raise LoadError.from_message("model 'digits': it hangs.")

    monkeypatch.setattr(child_process, "run", fail)
    arguments = build.arguments(input=[])
    document = json.loads(arguments["model_config"])
    with pytest.raises(LoadError, match=r"^model 'digits': it hangs\.$"):
        completion.complete(arguments, document)
    assert document == json.loads(arguments["model_config"])


# --- what is filled in -----------------------------------------------------------------------


@pytest.mark.parametrize("schema", [_BATCHED, _SINGLE], ids=["batched", "single"])
def test_empty_config(monkeypatch: pytest.MonkeyPatch, schema: Entry) -> None:
    """An empty config gets the schema of the model, and its other fields are unchanged."""
    document = _complete(monkeypatch, schema)
    assert {key: document[key] for key in schema} == schema
    before = json.loads(build.arguments()["model_config"])
    assert {key: document[key] for key in before if key not in schema} == {
        key: before[key] for key in before if key not in schema
    }


@pytest.mark.parametrize(
    ("schema", "written", "size", "x", "y"),
    [
        (_BATCHED, {"max_batch_size": 32}, 32, [4], [3]),
        (_BATCHED, {"max_batch_size": 1}, 1, [4], [3]),
        (_SINGLE, {}, 0, [4], [3]),
        (_BATCHED, {}, 8, [4], [3]),
        (_ROWS, {"max_batch_size": 16}, 16, [4], [3]),
        (_BATCHED, {"input": [_tensor("x", dims=[-1, 4])]}, 0, [-1, 4], [-1, 3]),
        (_BATCHED, {"input": [_tensor("x")]}, 0, [-1, 4], [-1, 3]),
        (_BATCHED, {"input": [_tensor("x")], "max_batch_size": 4}, 4, [4], [3]),
        (_BATCHED, {"output": [_tensor("y")]}, 8, [4], [3]),
    ],
)
def test_batch(
    monkeypatch: pytest.MonkeyPatch,
    schema: Entry,
    written: Entry,
    size: int,
    x: list[int],
    y: list[int],
) -> None:
    """A written max_batch_size is kept and decides whether dims include the batch."""
    document = _complete(monkeypatch, schema, **written)
    assert document["max_batch_size"] == size
    assert document["input"][0]["dims"] == x
    assert document["output"][0]["dims"] == y


@pytest.mark.parametrize(
    ("written", "completed"),
    [
        (_tensor("x"), _X),
        (_tensor("mask", None), _MASK),
        (_tensor("x", None, [-1]), _tensor("x", dims=[-1])),
        (_tensor("INPUT__1", None), _tensor("INPUT__1", "TYPE_BOOL", [-1])),
        (_tensor("input__0", None), _tensor("input__0", dims=[4])),
        (_tensor("other", "TYPE_INT8", [9]), _tensor("other", "TYPE_INT8", [9])),
        (_tensor("x") | {"optional": True}, _X | {"optional": True}),
    ],
)
def test_partial_inputs(monkeypatch: pytest.MonkeyPatch, written: Entry, completed: Entry) -> None:
    """Fields of an entry are kept; missing ones come from the tensor of its name or number."""
    document = _complete(monkeypatch, _BATCHED, input=[written], max_batch_size=8)
    assert document["input"] == [completed]
    assert document["output"] == _BATCHED["output"]


def test_partial_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config may list a part of the outputs; names come before numbers."""
    written = [_tensor("OUTPUT__1", None), _tensor("y")]
    document = _complete(monkeypatch, _BATCHED, output=written)
    assert document["output"] == [_tensor("OUTPUT__1", "TYPE_STRING", [1]), _Y]
    assert document["input"] == _BATCHED["input"]
    swapped = [_tensor("OUTPUT__1", dims=[1]), _tensor("OUTPUT__0", dims=[2])]
    document = _complete(
        monkeypatch, {**_BATCHED, "output": swapped}, output=[_tensor("OUTPUT__0")]
    )
    assert document["output"] == [_tensor("OUTPUT__0", dims=[2])]


_NO_DIMS = {"dims": [1], "reshape": {"shape": []}}


@pytest.mark.parametrize(
    ("dims", "written", "completed"),
    [
        ([], {}, _NO_DIMS),
        ([], {"input": [_tensor("x", None)], "max_batch_size": 8}, _NO_DIMS),
        ([], {"input": [_tensor("x", None)]}, {"dims": [-1]}),
        ([4], {"max_batch_size": 8}, _NO_DIMS),
    ],
)
def test_one_value_a_row(
    monkeypatch: pytest.MonkeyPatch, dims: list[int], written: Entry, completed: Entry
) -> None:
    """A tensor [rows] gets a dimension for Triton, and a reshape that removes it."""
    shape = {"dims": dims} if dims else _NO_DIMS
    entry = {"data_type": "TYPE_FP32", **shape}
    schema = {
        "input": [{"name": "x", **entry}],
        "output": [{"name": "y", **entry}],
        "max_batch_size": 0 if dims else 8,
    }
    document = _complete(monkeypatch, schema, **written)
    expected = {"data_type": "TYPE_FP32", **completed}
    assert document["input"] == [{"name": "x", **expected}]
    assert document["output"] == [{"name": "y", **expected}]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"input": [_tensor("x", "TYPE_INT32")]}, "'x' is TYPE_INT32 in config.pbtxt; expected"),
        ({"input": [_tensor("picture", None)]}, "expected names among x, mask, INPUT__0"),
        ({"output": [_tensor("OUTPUT__2", None)]}, "output 'OUTPUT__2' lacks data_type or dims"),
        ({"output": [_tensor("x", None)]}, "output 'x' lacks"),
        # Their models are not run.
        ({"input": [_X], "batch_input": [{}]}, "not inferred for a model with ragged inputs"),
        ({"input": [_X], "batch_output": [{}]}, "not inferred for a model with ragged outputs"),
        ({"output": [_Y], "sequence_batching": {}}, "not inferred for a model of sequences"),
        ({"model_transaction_policy": {"decoupled": True}}, "not inferred for a decoupled model"),
    ],
)
def test_refused(monkeypatch: pytest.MonkeyPatch, written: Entry, message: str) -> None:
    """Tensors that the model lacks or has with another type are refused."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        _complete(monkeypatch, _BATCHED, max_batch_size=8, **written)
