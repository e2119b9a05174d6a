"""Completing a config from its model."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import build
import pytest

from torch_py_backend.autocomplete import completion
from torch_py_backend.errors import ConfigError, LoadError, OptionError
from torch_py_backend.processes import child_process

Entry = dict[str, Any]


def _tensor(name: str, data_type: str | None = "TYPE_FP32", dims: list[int] | None = None) -> Entry:
    """Return an entry of Triton's JSON, in which fields that config.pbtxt lacks are empty."""
    return {"name": name, "data_type": data_type or "TYPE_INVALID", "dims": dims or []}


_X, _MASK = _tensor("x", dims=[4]), _tensor("mask", "TYPE_BOOL", [-1])
_Y, _Z = _tensor("y", dims=[3]), _tensor("z", "TYPE_STRING", [1])
_BATCHED = {"input": [_X, _MASK], "output": [_Y, _Z], "max_batch_size": 8}
_SINGLE = {**_BATCHED, "max_batch_size": 0}


class _Model:
    """Replaces the child process: returns a schema and records its arguments."""

    def __init__(self, schema: Entry) -> None:
        self.schema = {"decoupled": False} | schema
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
    ("document", "needed"),
    [
        pytest.param({"input": [_X], "output": [_Y]}, False, id="complete"),
        pytest.param({"input": [_X, _MASK], "output": [_Y, _Z]}, False, id="two-complete"),
        pytest.param({}, True, id="nothing"),
        pytest.param({"input": [], "output": []}, True, id="empty-lists"),
        pytest.param({"input": [_X]}, True, id="no-output"),
        pytest.param({"input": [_X], "output": []}, True, id="empty-output"),
        pytest.param({"output": [_Y]}, True, id="no-input"),
        pytest.param({"input": [_X, _tensor("m")], "output": [_Y]}, True, id="second-lacks-dims"),
        pytest.param(
            {"input": [_tensor("x", None, [4])], "output": [_Y]}, True, id="lacks-data-type"
        ),
        pytest.param({"input": [_X], "output": [{"name": "y"}]}, True, id="only-a-name"),
        pytest.param(
            {"input": [_X], "output": [_tensor("y", dims=[-1])]}, False, id="any-size-is-a-size"
        ),
        pytest.param(
            {"input": [_X], "output": [_Y], "max_batch_size": 0}, False, id="no-batch-is-no-gap"
        ),
    ],
)
def test_needed(document: Entry, needed: bool) -> None:
    """A config is incomplete if inputs or outputs are missing, or one lacks its type or dims."""
    assert completion.is_incomplete(document) is needed


_ADAPTER = """
import json
import sys
import types

sys.modules["torch"] = None  # an import of it fails
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


_YIELDS = "class A(nn.Module):\n    def forward(self, x):\n        yield x\n"
_DECOUPLED = {"decoupled": True}


@pytest.mark.parametrize(
    ("document", "policy"),
    [
        pytest.param({}, _DECOUPLED, id="unset"),
        pytest.param({"default_model_filename": "other.py"}, None, id="another-file"),
        pytest.param({"default_model_filename": "model.pt"}, None, id="no-source"),
        pytest.param(
            {"model_transaction_policy": {"decoupled": False}}, {"decoupled": False}, id="written"
        ),
        pytest.param(
            {"parameters": {"MODEL_CLASS": {"string_value": "B"}}}, None, id="another-class"
        ),
        # The source does not show what a factory returns.
        pytest.param({"parameters": {"MODEL_FACTORY": {"string_value": "A"}}}, None, id="factory"),
    ],
)
def test_a_source_that_yields(document: Entry, policy: Entry | None, tmp_path: Path) -> None:
    """A complete config without a transaction policy is decoupled if its source yields."""
    (tmp_path / "model.py").write_text(_YIELDS)
    (tmp_path / "other.py").write_text(_YIELDS.replace("yield", "return"))
    changed = completion.set_decoupled(document, tmp_path)
    assert changed is (policy is _DECOUPLED)
    assert document.get("model_transaction_policy") == policy


@pytest.mark.parametrize(
    ("decoupled", "written", "policy"),
    [(True, None, _DECOUPLED), (False, None, None), (True, {"decoupled": False}, None)],
)
def test_a_model_that_streams(
    decoupled: bool, written: Entry | None, policy: Entry | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config of a model that streams is decoupled, unless it says otherwise."""
    config = {} if written is None else {"model_transaction_policy": written}
    document = _complete(monkeypatch, {**_SINGLE, "decoupled": decoupled}, **config)
    assert document.get("model_transaction_policy") == (policy or written)


def test_arguments_of_the_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child process gets Triton's arguments, and AUTO_COMPLETE_TIMEOUT_S as time limit."""
    model = _Model(_BATCHED)
    monkeypatch.setattr(child_process, "run", model)
    parameters = {"AUTO_COMPLETE_TIMEOUT_S": {"string_value": "7"}}
    arguments = build.arguments(input=[], output=[], parameters=parameters)
    completion.complete(arguments, json.loads(arguments["model_config"]))
    assert model.calls == [
        (build.MODEL, "torch_py_backend.autocomplete.schema:describe", {"arguments": arguments}, 7)
    ]


@pytest.mark.parametrize(("seconds", "limit"), [(5.5, 5.5), (7.0, 7), (600.0, 7)])
def test_the_smaller_limit_applies(
    monkeypatch: pytest.MonkeyPatch, seconds: float, limit: float
) -> None:
    """The time limit is the smaller one of the argument and of AUTO_COMPLETE_TIMEOUT_S."""
    model = _Model(_BATCHED)
    monkeypatch.setattr(child_process, "run", model)
    parameters = {"AUTO_COMPLETE_TIMEOUT_S": {"string_value": "7"}}
    arguments = build.arguments(parameters=parameters, input=[], output=[])
    completion.complete(arguments, json.loads(arguments["model_config"]), seconds)
    assert model.calls[0][-1] == limit


def test_wrong_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that is invalid at load raises before a child process is started."""
    model = _Model(_BATCHED)
    monkeypatch.setattr(child_process, "run", model)
    parameters = {"AUTO_COMPLETE_TIMEOUT_S": {"string_value": "soon"}}
    arguments = build.arguments(input=[], parameters=parameters)
    with pytest.raises(OptionError, match="AUTO_COMPLETE_TIMEOUT_S is 'soon'"):
        completion.complete(arguments, json.loads(arguments["model_config"]))
    assert model.calls == []


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
        pytest.param(_BATCHED, {"max_batch_size": 32}, 32, [4], [3], id="larger"),
        pytest.param(_BATCHED, {"max_batch_size": 1}, 1, [4], [3], id="smaller"),
        pytest.param(_SINGLE, {}, 0, [4], [3], id="absent-and-single"),
        pytest.param(_BATCHED, {}, 8, [4], [3], id="absent-and-batched"),
        pytest.param(
            {
                "input": [_tensor("x", dims=[2, 4])],
                "output": [_tensor("y", dims=[2, 3])],
                "max_batch_size": 0,
            },
            {"max_batch_size": 16},
            16,
            [4],
            [3],
            id="batched-by-the-config-alone",
        ),
        pytest.param(
            _BATCHED,
            {"input": [_tensor("x", dims=[-1, 4])]},
            0,
            [-1, 4],
            [-1, 3],
            id="inputs-without-a-batch",
        ),
        pytest.param(
            _BATCHED, {"input": [_tensor("x")]}, 0, [-1, 4], [-1, 3], id="names-without-a-batch"
        ),
        pytest.param(
            _BATCHED,
            {"input": [_tensor("x")], "max_batch_size": 4},
            4,
            [4],
            [3],
            id="names-with-a-batch",
        ),
        pytest.param(_BATCHED, {"output": [_tensor("y")]}, 8, [4], [3], id="outputs-do-not-decide"),
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
        pytest.param([_tensor("x")], [_X], id="name-and-type"),
        pytest.param([_tensor("mask", None)], [_MASK], id="name"),
        pytest.param([_tensor("x", None, [-1])], [_tensor("x", dims=[-1])], id="dims-stay"),
        pytest.param(
            [_tensor("mask", None), _tensor("x", None)], [_MASK, _X], id="order-of-the-config"
        ),
        pytest.param(
            [_tensor("INPUT__1", None)], [_tensor("INPUT__1", "TYPE_BOOL", [-1])], id="ordinal"
        ),
        pytest.param(
            [_tensor("input__0", None)], [_tensor("input__0", dims=[4])], id="small-ordinal"
        ),
        pytest.param(
            [_tensor("other", "TYPE_INT8", [9])],
            [_tensor("other", "TYPE_INT8", [9])],
            id="complete",
        ),
        pytest.param([_X | {"optional": True}], [_X | {"optional": True}], id="optional-stays"),
        pytest.param(
            [_tensor("x") | {"format": "FORMAT_NHWC"}],
            [_X | {"format": "FORMAT_NHWC"}],
            id="other-fields-stay",
        ),
    ],
)
def test_partial_inputs(
    monkeypatch: pytest.MonkeyPatch, written: list[Entry], completed: list[Entry]
) -> None:
    """Fields of an entry are kept; missing ones come from the tensor of its name or number."""
    document = _complete(monkeypatch, _BATCHED, input=written, max_batch_size=8)
    assert document["input"] == completed
    assert document["output"] == _BATCHED["output"]


def test_partial_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config may list a part of the outputs, by name or by number."""
    written = [_tensor("OUTPUT__1", None), _tensor("y")]
    document = _complete(monkeypatch, _BATCHED, output=written)
    assert document["output"] == [_tensor("OUTPUT__1", "TYPE_STRING", [1]), _Y]
    assert document["input"] == _BATCHED["input"]


@pytest.mark.parametrize(
    ("dims", "written", "completed"),
    [
        pytest.param([], {}, {"dims": [1], "reshape": {"shape": []}}, id="as-it-is"),
        pytest.param(
            [],
            {"input": [_tensor("x", None)], "max_batch_size": 8},
            {"dims": [1], "reshape": {"shape": []}},
            id="partial",
        ),
        pytest.param([], {"input": [_tensor("x", None)]}, {"dims": [-1]}, id="without-a-batch"),
        pytest.param(
            [4], {"max_batch_size": 8}, {"dims": [1], "reshape": {"shape": []}}, id="with-a-batch"
        ),
    ],
)
def test_one_value_a_row(
    monkeypatch: pytest.MonkeyPatch, dims: list[int], written: Entry, completed: Entry
) -> None:
    """A tensor [rows] gets a dimension for Triton, and a reshape that removes it."""
    shape = {"dims": [1], "reshape": {"shape": []}} if not dims else {"dims": dims}
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


def test_names_come_before_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor whose name looks like another one's number is found by its name."""
    schema = {**_BATCHED, "input": [_tensor("INPUT__1", dims=[1]), _tensor("INPUT__0", dims=[2])]}
    document = _complete(monkeypatch, schema, input=[_tensor("INPUT__0")], max_batch_size=8)
    assert document["input"] == [_tensor("INPUT__0", dims=[2])]


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        pytest.param(
            {"input": [_tensor("x", "TYPE_INT32")]},
            ("input 'x' is TYPE_INT32", "expected TYPE_FP32"),
            id="type-by-name",
        ),
        pytest.param(
            {"output": [_tensor("OUTPUT__1", "TYPE_BOOL")]},
            ("output 'OUTPUT__1' is TYPE_BOOL", "expected TYPE_STRING"),
            id="type-by-number",
        ),
        pytest.param(
            {"input": [_tensor("picture", None)]},
            ("input 'picture' lacks data_type or dims", "expected names among x, mask, INPUT__0"),
            id="no-such-name",
        ),
        pytest.param(
            {"output": [_tensor("OUTPUT__2", None)]},
            ("output 'OUTPUT__2'", "expected names among y, z"),
            id="no-such-number",
        ),
        pytest.param({"output": [_tensor("x", None)]}, ("output 'x'",), id="input-as-an-output"),
        pytest.param({"input": [_tensor("", None)]}, ("input ''",), id="no-name"),
        pytest.param(
            {"input": [_tensor("x\n[/red]", None)]}, ("lacks data_type or dims",), id="hostile-name"
        ),
    ],
)
def test_contradictions(
    monkeypatch: pytest.MonkeyPatch, written: Entry, parts: tuple[str, ...]
) -> None:
    """A tensor that the model lacks, or has with another type, raises with both sides."""
    with pytest.raises(ConfigError) as error:
        _complete(monkeypatch, _BATCHED, max_batch_size=8, **written)
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize("role", ["batch_input", "batch_output"])
def test_ragged_batches(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    """A config with ragged inputs must be complete: their dims cannot be inferred."""
    with pytest.raises(ConfigError) as error:
        _complete(monkeypatch, _BATCHED, input=[_X], **{role: [{"source_input": ["x"]}]})
    assert f"config.pbtxt has {role} and lacks inputs or outputs" in str(error.value)


def test_the_file_is_not_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Completion changes the document and not config.pbtxt."""
    config = tmp_path / "config.pbtxt"
    config.write_text('backend: "pytorch_py"\n')
    _complete(monkeypatch, _BATCHED, name=tmp_path.name)
    assert [path.name for path in tmp_path.iterdir()] == ["config.pbtxt"]
    assert config.read_text() == 'backend: "pytorch_py"\n'


# --- sequences -------------------------------------------------------------------------------


def test_states_are_not_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """States and controls are not added to the config; written ones are completed."""
    schema = _BATCHED | {"sequence_tensors": ["mask", "z"]}

    completed = _complete(monkeypatch, schema)
    assert [entry["name"] for entry in completed["input"]] == ["x"]
    assert [entry["name"] for entry in completed["output"]] == ["y"]
    completed = _complete(monkeypatch, schema, output=[{"name": "y"}, {"name": "z"}])
    assert completed["output"][1] == _Z
