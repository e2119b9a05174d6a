"""batch_input and batch_output of config.pbtxt."""

from typing import Any

import build
import pytest

from torch_py_backend.config import model_config
from torch_py_backend.config.batch_io import BatchInputKind, BatchOutput
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError

_VALID = {
    "batch_input": {
        "kind": "BATCH_ELEMENT_COUNT",
        "target_name": ["n"],
        "data_type": "TYPE_INT32",
        "source_input": ["x"],
    },
    "batch_output": {
        "kind": "BATCH_SCATTER_WITH_INPUT_SHAPE",
        "target_name": ["y"],
        "source_input": ["x"],
    },
}


def tensor(name: str, *dims: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": "TYPE_FP32", "dims": list(dims), **more}


def parsed(**changes: Any) -> ModelConfig:
    """Return a config with the inputs x and z, of which z is optional, and the outputs y and w."""
    inputs = [tensor("x", -1, allow_ragged_batch=True), tensor("z", 4, optional=True)]
    outputs = [tensor("y", -1), tensor("w", 2, -1)]
    entries: Any = {role: [_VALID[role] | entry] for role, entry in changes.items()}
    return model_config.parse(build.arguments(input=inputs, output=outputs, **entries))


def test_batch_input() -> None:
    """Each kind that Triton defines is accepted, with both types that Triton accepts."""
    for kind in BatchInputKind:
        for dtype in ("INT32", "FP32"):
            config = parsed(batch_input={"kind": kind.value, "data_type": f"TYPE_{dtype}"})
            assert str(config.batch_inputs[0]) == f"n {dtype} ({kind.value} of x)"


def test_targets() -> None:
    """Each target of an entry is a separate input or output."""
    config = parsed(batch_input={"target_name": ["n", "m"]}, batch_output={})
    assert [entry.name for entry in config.batch_inputs] == ["n", "m"]
    assert config.batch_outputs == (BatchOutput("y", "x"),)
    assert config.concatenates
    assert not parsed().concatenates


@pytest.mark.parametrize(
    ("role", "changes", "message"),
    [
        ("input", {"kind": "BATCH_WHATEVER"}, "has the kind BATCH_WHATEVER; expected BATCH_ELEM"),
        ("input", {"data_type": "TYPE_INT64"}, "TYPE_INT64; expected TYPE_INT32 or TYPE_FP32"),
        ("input", {"source_input": []}, "has 0 source_input; expected one"),
        ("input", {"source_input": ["a"]}, "'a', which is no input; expected one of x, z"),
        ("input", {"source_input": ["z"]}, "'z', which requests may leave out; expected an input"),
        ("input", {"target_name": []}, "has no target_name; expected at least one"),
        ("input", {"target_name": ["n", "n"]}, "makes 'n', which is an input or a batch_input"),
        ("output", {"kind": "BATCH_GATHER"}, "the kind BATCH_GATHER; expected BATCH_SCATTER_WITH_"),
        ("output", {"source_input": ["x", "z"]}, "has 2 source_input; expected one"),
        ("output", {"target_name": ["a"]}, "'a', which is no output; expected names among y, w"),
        ("output", {"target_name": ["y", "y"]}, "names 'y', twice"),
    ],
)
def test_invalid_entry(role: str, changes: dict[str, Any], message: str) -> None:
    """Invalid kinds, types, names and shapes are rejected at load."""
    with pytest.raises(ConfigError) as raised:
        parsed(**{f"batch_{role}": changes})
    assert str(raised.value).startswith(f"batch_{role} ")
    assert message in str(raised.value)
