"""Instances of models in this process, with the fake of Triton's utilities."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import fake_triton
import numpy as np
import pytest
import scenarios
from scenarios import Refused, Scenario

from torch_py_backend.adapter import TritonPythonModel


class Served:
    """An instance, whose config was completed as by Triton, and what sends requests to it."""

    def __init__(self, folder: Path, scenario: Scenario, kind: str = "CPU") -> None:
        self.model = TritonPythonModel()
        arguments = fake_triton.arguments(scenario.lay_out(folder))
        if arguments["model_instance_kind"] == "CPU":
            arguments |= {"model_instance_kind": kind}
        arguments = fake_triton.completed(self.model, arguments)
        self.document = json.loads(arguments["model_config"])
        self.model.initialize(arguments)
        fake_triton.Logger.lines.clear()

    def request(self, inputs: dict[str, Any], name: str = "", **how: Any) -> Any:
        turn = how["turn"] = how.get("turn") or fake_triton.Turn(0)
        tensors = fake_triton.request(inputs, self.document, name, turn).inputs()
        return fake_triton.InferenceRequest(tensors, name, **how)

    def send(self, *requests: Any) -> list[list[Any]]:
        """Return the responses to each request: of a stream, once it has ended."""
        responses = self.model.execute(list(requests))
        if responses is None:
            return list(map(ended, requests))
        return [[response] for response in responses]


def copied(folder: Path, model: Path) -> Served:
    """An instance of a copy of a model folder."""

    def copy(version: Path) -> None:
        shutil.copytree(model / "1", version, dirs_exist_ok=True)

    return Served(folder, Scenario(model.name, copy, (model / "config.pbtxt").read_text()))


def load(folder: Path, scenario: Scenario) -> TritonPythonModel:
    return Served(folder, scenario).model


def ended(request: Any) -> list[Any]:
    """Return the responses of a stream once it has ended."""
    assert request.sender.ended.wait(30)
    responses: list[Any] = request.sender.responses
    return responses


def named(name: str) -> Scenario:
    (scenario,) = [entry for entry in scenarios.TABLE if entry.name == name]
    return scenario


def request(value: float, name: str = "", *, rows: int = 1, cancelled: bool = False) -> Any:
    """A request whose input x is FP32 [4], the same value everywhere."""
    x = np.full((rows, 4), value, dtype=np.float32)
    return fake_triton.InferenceRequest([fake_triton.Tensor("x", x)], name, cancelled=cancelled)


def unreadable(error: Exception | None = None, name: str = "x", **how: Any) -> Any:
    """A request whose only input Triton's utilities cannot read."""
    tensor: Any = fake_triton.Tensor(name, np.ones((1, 4), dtype=np.float32))
    tensor.as_numpy = mock.Mock(side_effect=error or ValueError("unpack requires 4 bytes"))
    return fake_triton.InferenceRequest([tensor], **how)


def lose_device(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = mock.Mock(side_effect=RuntimeError("CUDA error: device-side assert triggered"))
    monkeypatch.setattr("torch_py_backend.pipeline.failures.probe", lost)


_STATUS = {
    fake_triton.TritonError.INTERNAL: 500,
    fake_triton.TritonError.INVALID_ARG: 400,
    fake_triton.TritonError.UNAVAILABLE: 503,
}


def check_refusal(error: Any, expected: Refused) -> None:
    assert error is not None
    assert _STATUS[error.code()] == expected.status
    expected.check(error.message())


def logged(level: str = "error") -> list[str]:
    return [text for logged_level, text in fake_triton.Logger.lines if logged_level == level]
