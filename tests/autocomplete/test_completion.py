from __future__ import annotations

import json
from typing import Any
from unittest import mock

import build
import fake_triton
import pytest

from torch_py_backend.adapter import TritonPythonModel
from torch_py_backend.autocomplete import completion
from torch_py_backend.processes import child_process

_SCHEMA = {"input": ["x"], "output": ["y"], "max_batch_size": 8}


def test_complete_config_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "run", mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr(fake_triton, "_model_dir", "/models/digits/1")
    config: Any = fake_triton.ModelConfig(json.loads(build.arguments()["model_config"]))
    assert TritonPythonModel.auto_complete_config(config) is config


@pytest.mark.parametrize(
    ("written", "filled"),
    [
        ({}, _SCHEMA),
        ({"max_batch_size": 32}, {**_SCHEMA, "max_batch_size": 32}),
        ({"output": ["z"]}, {**_SCHEMA, "output": ["z"]}),
        # Without a batch dimension, as inputs are listed.
        ({"input": ["z"]}, {"input": ["z"], "output": ["y"], "max_batch_size": 0}),
    ],
)
def test_what_config_pbtxt_has_is_kept(written: dict[str, Any], filled: dict[str, Any]) -> None:
    document = {"input": [], "output": [], "max_batch_size": 0} | written
    completion.fill(document, _SCHEMA)
    assert document == filled
