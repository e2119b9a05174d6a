"""Completing a config from its model."""

from __future__ import annotations

import copy
import json
from typing import Any
from unittest import mock

import build
import fake_triton
import pytest

from torch_py_backend.adapter import TritonPythonModel
from torch_py_backend.autocomplete import completion
from torch_py_backend.processes import child_process

Entry = dict[str, Any]


def _tensor(name: str, data_type: str | None = "TYPE_FP32", dims: list[int] | None = None) -> Entry:
    """Return an entry of Triton's JSON, in which fields that config.pbtxt lacks are empty."""
    return {"name": name, "data_type": data_type or "TYPE_INVALID", "dims": dims or []}


_X, _MASK = _tensor("x", dims=[4]), _tensor("mask", "TYPE_BOOL", [-1])
_Y, _Z = _tensor("y", dims=[3]), _tensor("z", "TYPE_STRING", [1])
_BATCHED = {"input": [_X, _MASK], "output": [_Y, _Z], "max_batch_size": 8}
_ROWS = {
    "input": [_tensor("x", dims=[2, 4])],
    "output": [_tensor("y", dims=[2, 3])],
    "max_batch_size": 0,
}


def _filled(schema: Entry, **written: Any) -> Entry:
    """Return a config whose gaps a model's schema fills."""
    arguments = build.arguments(**({"max_batch_size": 0, "input": [], "output": []} | written))
    document: Entry = json.loads(arguments["model_config"])
    completion.fill(document, copy.deepcopy(schema))
    return document


# --- whether the model is run ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "incomplete"),
    [
        ({"input": [_X, _MASK], "output": [_Y, _Z]}, False),
        ({"input": [_X], "output": []}, True),
        ({"output": [_Y]}, True),
        ({"input": [_tensor("x", None, [4])], "output": [_Y]}, True),
        ({"input": [{"name": "x"}], "output": [_Y]}, True),
    ],
)
def test_incomplete(document: Entry, incomplete: bool) -> None:
    """A config is incomplete if inputs or outputs are missing, or one lacks its type or dims."""
    assert completion.is_incomplete(document) is incomplete


def test_complete_config_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete config starts no child process."""
    monkeypatch.setattr(child_process, "run", mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr(fake_triton, "_model_dir", "/models/digits/1")
    config: Any = fake_triton.ModelConfig(json.loads(build.arguments()["model_config"]))
    assert TritonPythonModel.auto_complete_config(config) is config


# --- what is filled in -----------------------------------------------------------------------


_NO_DIMS = {"dims": [1], "reshape": {"shape": []}}
_VALUES = {"input": [{**_X, **_NO_DIMS}], "output": [{**_Y, **_NO_DIMS}], "max_batch_size": 8}


@pytest.mark.parametrize(
    ("schema", "written", "size", "x", "y"),
    [
        (_BATCHED, {"max_batch_size": 32}, 32, {"dims": [4]}, {"dims": [3]}),
        (_BATCHED, {}, 8, {"dims": [4]}, {"dims": [3]}),
        (_ROWS, {"max_batch_size": 16}, 16, {"dims": [4]}, {"dims": [3]}),
        (
            _BATCHED,
            {"input": [_tensor("x", dims=[-1, 4])]},
            0,
            {"dims": [-1, 4]},
            {"dims": [-1, 3]},
        ),
        # Triton needs a dimension for one value per row, which a reshape removes.
        (_VALUES, {}, 8, _NO_DIMS, _NO_DIMS),
        (_VALUES, {"input": [_tensor("x", dims=[-1])]}, 0, {"dims": [-1]}, {"dims": [-1]}),
    ],
)
def test_batch(schema: Entry, written: Entry, size: int, x: Entry, y: Entry) -> None:
    """A written max_batch_size is kept and decides whether dims include the batch."""
    document = _filled(schema, **written)
    assert document["max_batch_size"] == size
    assert document["input"][0] == {**_X, **x}
    assert document["output"][0] == {**_Y, **y}
