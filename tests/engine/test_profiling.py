"""Traces of a model that serves with PROFILE_DIR."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import fake_triton
import models
import numpy as np
import pytest
import scenarios
import torch
from scenarios import Scenario

from torch_py_backend.adapter import TritonPythonModel
from torch_py_backend.engine.profiling import BATCHES

_SECONDS = 60
_YIELDS = """\
class Yields(nn.Module):
    def forward(self, x: Tensor):
        for _ in range(4):
            x = -x
            yield x
"""
_DECOUPLED = "model_transaction_policy { decoupled: true }\n"

pytestmark = pytest.mark.usefixtures("process")


class _Served:
    """A model that was loaded through the adapter, with PROFILE_DIR."""

    def __init__(self, folder: Path, code: str = "", more: str = "") -> None:
        self.traces = folder / "traces"
        self.traces.mkdir()
        parameters = {"PROFILE_DIR": str(self.traces)}
        text = scenarios.config({"x": [4]}, {"y": [4]}, parameters=parameters, more=more)
        source = scenarios.text(models.source() + code) if code else scenarios.python(models.Negate)
        self.model = TritonPythonModel()
        self.model.initialize(fake_triton.arguments(Scenario("m", source, text).lay_out(folder)))

    def send(self, times: int) -> None:
        x = np.ones((1, 4), dtype=np.float32)
        for _ in range(times):
            request = fake_triton.InferenceRequest([fake_triton.Tensor("x", x)])
            responses = self.model.execute([request])
            if responses is None:
                assert request.sender.ended.wait(_SECONDS)
                responses = request.sender.responses
            assert all(response.error() is None for response in responses)

    def trace_files(self) -> list[Path]:
        return sorted(self.traces.iterdir())


def _events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def _names(path: Path) -> list[str]:
    """Return the names of the events that are within the range of a batch."""
    events = [event for event in _events(path) if event["ph"] == "X"]
    batches = [event for event in events if event["name"] == "batch"]
    return [
        event["name"]
        for event in events
        if any(
            batch["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= batch["ts"] + batch["dur"]
            for batch in batches
        )
    ]


def test_first_batches(tmp_path: Path) -> None:
    """The first batches after READY are profiled, except one; those of the warm-up are not."""
    served = _Served(tmp_path)
    served.send(BATCHES)
    assert served.trace_files() == []
    served.send(3)
    (path,) = served.trace_files()
    served.model.finalize()
    assert served.trace_files() == [path]
    assert path.name.startswith("m_0_0-1.")  # the instance, and its version
    names = _names(path)
    assert names.count("batch") == BATCHES
    assert names.count("aten::neg") == BATCHES


def test_streams(tmp_path: Path) -> None:
    """For a decoupled model, each call of its code is a batch."""
    served = _Served(tmp_path, _YIELDS, _DECOUPLED)
    served.send(BATCHES)
    served.model.finalize()
    (path,) = served.trace_files()
    names = _names(path)
    assert names.count("batch") == BATCHES
    assert BATCHES / 2 < names.count("aten::neg") <= BATCHES


@pytest.mark.parametrize("more", ["", _DECOUPLED])
def test_unloading_ends_the_profile(more: str, tmp_path: Path) -> None:
    """A model that is unloaded before the first recorded batch writes nothing."""
    served = _Served(tmp_path, _YIELDS if more else "", more)
    served.model.finalize()
    assert served.trace_files() == []
    assert not torch._C._autograd._profiler_enabled()


def test_a_trace_that_cannot_be_written_costs_the_trace_only(tmp_path: Path) -> None:
    """If PROFILE_DIR becomes a file while the model serves, requests are answered."""
    served = _Served(tmp_path)
    served.traces.rmdir()
    served.traces.touch()
    served.send(BATCHES + 3)
    logged = [text for _, text in fake_triton.Logger.lines if "the profiler failed" in text]
    assert len(logged) == 1
