from typing import Any

import build
import pytest

from torch_py_backend.config import model_config
from torch_py_backend.config.batch_io import BatchInputKind, BatchOutput
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError


def tensor(name: str, *dims: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": "TYPE_FP32", "dims": list(dims), **more}


def parsed(**document: Any) -> ModelConfig:
    """Return a config with the inputs x and z, of which z is optional, and the outputs y and w."""
    inputs = [tensor("x", -1, allow_ragged_batch=True), tensor("z", 4, optional=True)]
    outputs = [tensor("y", -1), tensor("w", 2, -1)]
    return model_config.parse(build.arguments(**({"input": inputs, "output": outputs} | document)))


def batch_input(**entry: Any) -> dict[str, Any]:
    valid = {
        "kind": "BATCH_ELEMENT_COUNT",
        "target_name": ["n"],
        "data_type": "TYPE_INT32",
        "source_input": ["x"],
    }
    return {"batch_input": [valid | entry]}


def batch_output(**entry: Any) -> dict[str, Any]:
    valid = {
        "kind": "BATCH_SCATTER_WITH_INPUT_SHAPE",
        "target_name": ["y"],
        "source_input": ["x"],
    }
    return {"batch_output": [valid | entry]}


@pytest.mark.parametrize("kind", [kind.value for kind in BatchInputKind])
def test_batch_input(kind: str) -> None:
    """Each kind that Triton defines is accepted, with both types that Triton accepts."""
    for dtype in ("INT32", "FP32"):
        (entry,) = parsed(**batch_input(kind=kind, data_type=f"TYPE_{dtype}")).batch_inputs
        assert str(entry) == f"n {dtype} ({kind} of x)"


def test_targets() -> None:
    """Each target of an entry is a separate input or output."""
    config = parsed(**batch_input(target_name=["n", "m"]), **batch_output(target_name=["y"]))

    assert [entry.name for entry in config.batch_inputs] == ["n", "m"]
    assert config.batch_outputs == (BatchOutput("y", "x"),)
    assert config.concatenates
    assert not parsed().concatenates


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "BATCH_WHATEVER"}, "has the kind BATCH_WHATEVER; expected BATCH_ELEMENT_COUNT"),
        ({"data_type": "TYPE_INT64"}, "has data_type TYPE_INT64; expected TYPE_INT32 or TYPE_FP32"),
        ({"source_input": []}, "has 0 source_input; expected one"),
        ({"source_input": ["a"]}, "source_input 'a', which is no input; expected one of x, z"),
        ({"source_input": ["z"]}, "'z', which requests may leave out. Remove optional from 'z'"),
        ({"target_name": []}, "has no target_name; expected at least one"),
        ({"target_name": ["x"]}, "makes 'x', and config.pbtxt has that name"),
        ({"target_name": ["n", "n"]}, "makes 'n', and config.pbtxt has that name"),
    ],
)
def test_invalid_batch_input(changes: dict[str, Any], message: str) -> None:
    """Invalid kinds, types and names of batch inputs are rejected at load."""
    with pytest.raises(ConfigError) as raised:
        parsed(**batch_input(**changes))

    assert str(raised.value).startswith("model 'digits': batch_input ")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "BATCH_GATHER"}, "has the kind BATCH_GATHER; expected BATCH_SCATTER_WITH_"),
        ({"source_input": ["x", "z"]}, "has 2 source_input; expected one"),
        ({"target_name": ["a"]}, "names 'a', which is no output; expected names among y, w"),
        ({"target_name": ["y", "y"]}, "names 'y', twice; expected names among y, w, each once"),
        (
            {"target_name": ["w"]},
            "gives 'w' of dims [2, -1] the shape of 'x' of dims [-1]; expected for each dim of -1",
        ),
    ],
)
def test_invalid_batch_output(changes: dict[str, Any], message: str) -> None:
    """Invalid kinds, names and shapes of batch outputs are rejected at load."""
    with pytest.raises(ConfigError) as raised:
        parsed(**batch_output(**changes))

    assert str(raised.value).startswith("model 'digits': batch_output ")
    assert message in str(raised.value)
