"""Inputs of requests: generated, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from torch_py_backend.config import dtypes
from torch_py_backend.config.model_config import TensorSpec
from torch_py_backend.errors import BackendError, ToolError
from torch_py_backend.tools import payloads
from torch_py_backend.tools.payloads import Model, Tensor

_BATCHED = Model("m", 4, (TensorSpec("x", dtypes.from_triton("FP32"), (2,)),))
_PLAIN = Model("m", 0, (TensorSpec("x", dtypes.from_triton("FP32"), (-1, 2)),))
_TEXT = Model("m", 4, (TensorSpec("t", dtypes.from_triton("BYTES"), (1,)),))
_OPTIONAL = Model(
    "m",
    4,
    (
        TensorSpec("x", dtypes.from_triton("FP32"), (2,)),
        TensorSpec("y", dtypes.from_triton("INT64"), (1,), optional=True),
    ),
)
_FLOAT8 = safetensors.torch.save({"x": torch.ones(1, 2, dtype=torch.float8_e5m2)})
_BF16 = Model("m", 0, (TensorSpec("x", dtypes.from_triton("BF16"), (2,)),))


def _config(**fields: Any) -> dict[str, Any]:
    entry = {"name": "x", "data_type": "TYPE_FP32", "dims": [2]}
    return {"max_batch_size": 4, "input": [entry], **fields}


def test_model() -> None:
    """Configs of both protocols are read; gRPC's has strings as dims, and no zero or false."""
    assert payloads.model("m", _config()) == _BATCHED
    entry = {"name": "x", "data_type": "TYPE_FP32", "dims": ["-1", "2"]}
    assert payloads.model("m", {"name": "m", "input": [entry]}) == _PLAIN


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (_config(model_transaction_policy={"decoupled": True}), "is decoupled"),
        (_config(sequence_batching={}), "takes sequences"),
        (_config(input=[{"name": "x", "data_type": "TYPE_FP8"}]), "'x' has data_type TYPE_FP8"),
    ],
    ids=["decoupled", "sequences", "type"],
)
def test_models_that_are_refused(config: dict[str, Any], says: str) -> None:
    """Models that do not answer each request once are refused."""
    with pytest.raises(BackendError, match=says):
        payloads.model("m", config)


def test_made_up_of_every_type() -> None:
    """Every type has a value of the protocol's size."""
    inputs = tuple(TensorSpec(kind.triton, kind, (-1, 3)) for kind in dtypes.TABLE)
    (payload,) = payloads.generate(Model("m", 8, inputs), 2)
    for dtype in dtypes.TABLE:
        tensor = payload[dtype.triton]
        assert tensor.datatype == dtype.triton
        assert tensor.array.shape == (2, 1, 3)
        size = 8 if dtype.torch is None else getattr(torch, dtype.torch).itemsize
        assert len(tensor.encoded()) == 6 * size, dtype


@pytest.mark.parametrize(
    ("target", "rows", "says"),
    [
        (_BATCHED, 0, "would have 0 rows; model 'm' takes 1 to 4 .* Choose with --rows"),
        (_BATCHED, 5, "would have 5 rows"),
        (_PLAIN, 1, "has no batch dimension"),
    ],
)
def test_rows_that_are_refused(target: Model, rows: int, says: str) -> None:
    """A number of rows that the model does not take is refused; by default it is one."""
    (payload,) = payloads.generate(target, None)
    assert payload["x"].array.shape == (1, 2)
    with pytest.raises(ToolError, match=says):
        payloads.generate(target, rows)


def test_strings_on_the_wire() -> None:
    """Strings follow their length."""
    text = Tensor("BYTES", np.array([b"ab", b""], dtype=np.object_))
    assert text.encoded() == b"\x02\0\0\0ab\0\0\0\0"


def test_safetensors_of_every_type(tmp_path: Path) -> None:
    """The bytes of the file are what is sent."""
    torch_types = {kind.triton: getattr(torch, kind.torch) for kind in dtypes.TABLE if kind.torch}
    tensors = {name: torch.ones(2, 3).to(dtype) for name, dtype in torch_types.items()}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    inputs = tuple(TensorSpec(name, dtypes.from_triton(name), (3,)) for name in torch_types)
    (payload,) = payloads.read(tmp_path / "x.safetensors", Model("m", 8, inputs), None)
    for name, tensor in tensors.items():
        assert payload[name].encoded() == tensor.view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize(
    ("target", "name", "shape", "data", "sent"),
    [
        (_BATCHED, "x", [2, 2], [1, 2, 3, 4], [[1, 2], [3, 4]]),
        (_PLAIN, "x", [1, 2], [[1, 2]], [[1, 2]]),
        (_TEXT, "t", [1, 1], ["ä"], [["ä".encode()]]),
        (_OPTIONAL, "x", [1, 2], [1, 2], [[1, 2]]),
        (_BF16, "x", [2], [1, -2], [0x3F80, 0xC000]),
    ],
    ids=["flat", "nested", "text", "optional-left-out", "bfloat16-bits"],
)
def test_json(
    target: Model, name: str, shape: list[int], data: Any, sent: list[Any], tmp_path: Path
) -> None:
    """JSON in Triton's form is one request."""
    path = tmp_path / "x.json"
    datatype = target.inputs[0].dtype.triton
    entry = {"name": name, "shape": shape, "datatype": datatype, "data": data}
    path.write_text(json.dumps({"inputs": [entry]}), encoding="utf-8")
    (payload,) = payloads.read(path, target, None)
    assert {key: tensor.array.tolist() for key, tensor in payload.items()} == {name: sent}
    assert payload[name].datatype == datatype


@pytest.mark.parametrize(
    ("rows", "sent"),
    [(None, [[1, 2, 3]]), (1, [[1], [2], [3]]), (2, [[1, 2], [3, 1]]), (4, [[1, 2, 3, 1]])],
)
def test_rows_of_a_file(rows: int | None, sent: list[list[int]], tmp_path: Path) -> None:
    """A file's rows are sent in order, and the last request is filled from the start."""
    path = tmp_path / "x.json"
    path.write_bytes(_x([3, 2], data=[[number, 0] for number in (1, 2, 3)]))
    requests = payloads.read(path, _BATCHED, rows)
    assert [payload["x"].array[:, 0].tolist() for payload in requests] == sent


def _x(shape: list[int], datatype: str = "FP32", data: Any = None) -> bytes:
    values = [0.0] * int(np.prod(shape)) if data is None else data
    entry = {"name": "x", "shape": shape, "datatype": datatype, "data": values}
    return json.dumps({"inputs": [entry]}).encode()


@pytest.mark.parametrize(
    ("name", "content", "rows", "says"),
    [
        ("x.txt", b"", None, "is not a file of inputs; expected .safetensors or .json"),
        ("x.json", None, None, "cannot read .*x.json: No such file or directory"),
        ("x.json", b"{", None, "cannot understand .*: JSONDecodeError: Expecting property name"),
        ("x.json", b"[1]", None, "cannot understand .*; expected safetensors, or JSON"),
        ("x.json", b'{"inputs": []}', None, "holds no inputs"),
        ("x.json", _x([1, 2], data=[1, 2, 3]), None, "cannot reshape"),
        ("x.json", b'{"inputs": [{"name": "x"}]}', None, "KeyError: 'datatype'"),
        ("x.json", _x([1, 2], data=["a", "b"]), None, "numbers are expected"),
        ("x.json", _x([1, 2], "BYTES", [1, 2]), None, "cannot understand"),
        ("x.json", _x([1, 2], "FP8"), None, "KeyError: 'FP8'"),
        ("x.json", _x([1, 2], "FP16"), None, r"x as FP16 \[1, 2\]; model 'm' takes FP32 \[-1, 2\]"),
        ("x.json", _x([1, 3]), None, r"x as FP32 \[1, 3\]"),
        ("x.json", _x([2]), None, r"x as FP32 \[2\]"),
        ("x.json", _x([5, 2]), None, "would have 5 rows; model 'm' takes 1 to 4 .* with --rows"),
        ("x.json", _x([0, 2]), 1, "holds inputs of 0 rows"),
        ("x.json", _x([1, 2]), 5, "would have 5 rows"),
        ("x.safetensors", b"no such thing", None, "cannot understand .*: "),
        ("x.safetensors", safetensors.torch.save({"z": torch.ones(1)}), None, "holds z; model"),
        ("x.safetensors", _FLOAT8, None, "x is of type F8_E5M2, which Triton does not have"),
    ],
)
def test_files_that_are_refused(
    name: str, content: bytes | None, rows: int | None, says: str, tmp_path: Path
) -> None:
    """A file that does not fit is an error of one line."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ToolError, match=says) as refusal:
        payloads.read(tmp_path / name, _BATCHED, rows)
    assert "\n" not in str(refusal.value)


def test_inputs_of_different_rows_are_refused(tmp_path: Path) -> None:
    """All inputs of a request have the same number of rows."""
    path = tmp_path / "x.safetensors"
    tensors = {"x": torch.ones(2, 2), "y": torch.ones(3, 1, dtype=torch.int64)}
    safetensors.torch.save_file(tensors, path)
    for rows in (None, 2):
        with pytest.raises(ToolError, match="holds inputs of 2 and 3 rows"):
            payloads.read(path, _OPTIONAL, rows)
