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


def _filled(schema: Entry, **written: Any) -> Entry:
    """Return a config whose gaps a model's schema fills."""
    arguments = build.arguments(**({"max_batch_size": 0, "input": [], "output": []} | written))
    document: Entry = json.loads(arguments["model_config"])
    completion.fill(document, copy.deepcopy(schema))
    return document


# --- whether the model is run ----------------------------------------------------------------


def test_complete_config_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "run", mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr(fake_triton, "_model_dir", "/models/digits/1")
    config: Any = fake_triton.ModelConfig(json.loads(build.arguments()["model_config"]))
    assert TritonPythonModel.auto_complete_config(config) is config


# --- what is filled in -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "size", "x", "y"),
    [
        ({"max_batch_size": 32}, 32, _X, _Y),
        ({}, 8, _X, _Y),
        ({"input": [_tensor("x", dims=[-1, 4])]}, 0, _tensor("x", dims=[-1, 4]), _Y),
        ({"output": [_tensor("y", dims=[5])]}, 8, _X, _tensor("y", dims=[5])),
    ],
)
def test_what_config_pbtxt_has_is_kept_also_a_batch_size_of_0_beside_inputs(
    written: Entry, size: int, x: Entry, y: Entry
) -> None:
    document = _filled(_BATCHED, **written)
    assert document["max_batch_size"] == size
    assert (document["input"][0], document["output"][0]) == (x, y)
