from typing import Any

import build
import pytest

from torch_py_backend.config import model_config
from torch_py_backend.config.batch_io import BatchInput, BatchInputKind, BatchOutput
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError

_KINDS = [kind.value for kind in BatchInputKind]


def tensor(name: str, *dims: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": "TYPE_FP32", "dims": list(dims), **more}


def parsed(**document: Any) -> ModelConfig:
    """Return a config with the inputs x and z, of which z is optional, and the outputs y and w."""
    inputs = [tensor("x", -1, allow_ragged_batch=True), tensor("z", 4, optional=True)]
    outputs = [tensor("y", -1), tensor("w", 2, -1)]
    return model_config.parse(build.arguments(**({"input": inputs, "output": outputs} | document)))


def made(**entry: Any) -> dict[str, Any]:
    whole = {
        "kind": "BATCH_ELEMENT_COUNT",
        "target_name": ["n"],
        "data_type": "TYPE_INT32",
        "source_input": ["x"],
    }
    return {"batch_input": [whole | entry]}


def split(**entry: Any) -> dict[str, Any]:
    whole = {
        "kind": "BATCH_SCATTER_WITH_INPUT_SHAPE",
        "target_name": ["y"],
        "source_input": ["x"],
    }
    return {"batch_output": [whole | entry]}


@pytest.mark.parametrize("dtype", ["INT32", "FP32"])
@pytest.mark.parametrize("kind", _KINDS)
def test_batch_input(kind: str, dtype: str) -> None:
    """Each kind that Triton defines is accepted, with both types that Triton accepts."""
    (one,) = parsed(**made(kind=kind, data_type=f"TYPE_{dtype}")).batch_inputs

    assert (one.name, one.kind.value, one.dtype.triton, one.source) == ("n", kind, dtype, "x")
    assert str(one) == f"n {dtype} ({kind} of x)"


def test_targets() -> None:
    """Each target of an entry is a separate input or output."""
    found = parsed(**made(target_name=["n", "m"]), **split(target_name=["y"]))

    assert [one.name for one in found.batch_inputs] == ["n", "m"]
    assert all(isinstance(one, BatchInput) for one in found.batch_inputs)
    assert found.batch_outputs == (BatchOutput("y", "x"),)
    assert found.concatenates


def test_neither() -> None:
    """A config with neither block does not concatenate ragged inputs."""
    assert not parsed().concatenates


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (made(kind="BATCH_WHATEVER"), "has the kind BATCH_WHATEVER; expected BATCH_ELEMENT_COUNT"),
        (
            made(data_type="TYPE_INT64"),
            "has data_type TYPE_INT64; expected TYPE_INT32 or TYPE_FP32",
        ),
        (made(source_input=[]), "has 0 source_input; expected one"),
        (made(source_input=["x", "x"]), "has 2 source_input; expected one"),
        (made(source_input=["a"]), "source_input 'a', which is no input; expected one of x, z"),
        (made(source_input=["z"]), "'z', which requests may leave out. Remove optional from 'z'"),
        (made(target_name=[]), "has no target_name; expected at least one"),
        (made(target_name=["x"]), "makes 'x', and config.pbtxt has that name"),
        (made(target_name=["n", "n"]), "makes 'n', and config.pbtxt has that name"),
        (split(kind="BATCH_GATHER"), "has the kind BATCH_GATHER; expected BATCH_SCATTER_WITH_"),
        (split(source_input=["x", "z"]), "has 2 source_input; expected one"),
        (split(source_input=["a"]), "'a', which is no input; expected one of x, z"),
        (split(target_name=["a"]), "names 'a', which is no output; expected names among y, w"),
        (split(target_name=["y", "y"]), "names 'y', twice; expected names among y, w, each once"),
        (
            split(target_name=["w"]),
            "gives 'w' of dims [2, -1] the shape of 'x' of dims [-1]; expected for each dim of -1",
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_invalid_entry(block: dict[str, Any], says: str) -> None:
    """Invalid kinds, types and names are rejected at load."""
    with pytest.raises(ConfigError) as raised:
        parsed(**block)

    assert f"model 'digits': {next(iter(block))} " in str(raised.value)
    assert says in str(raised.value)
