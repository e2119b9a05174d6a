"""Traces of a model that serves with PROFILE_DIR."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import models
import pytest
import scenarios
import torch
from instances import Served, logged, request
from scenarios import Scenario

from torch_py_backend.adapter import PROFILED_BATCHES

pytestmark = pytest.mark.usefixtures("process")


class _Served(Served):
    def __init__(self, folder: Path) -> None:
        self.traces = folder / "traces"
        self.traces.mkdir()
        config = scenarios.x_to_y(PROFILE_DIR=str(self.traces))
        super().__init__(folder, Scenario("m", scenarios.python(models.Negate), config))

    def repeat(self, times: int) -> None:
        for _ in range(times):
            (responses,) = self.send(request(1))
            assert all(response.error() is None for response in responses)


def test_the_first_batches_after_ready_are_profiled_except_one(tmp_path: Path) -> None:
    served = _Served(tmp_path)
    served.repeat(PROFILED_BATCHES)
    assert list(served.traces.iterdir()) == []
    served.repeat(3)
    (path,) = served.traces.iterdir()
    served.model.finalize()
    assert list(served.traces.iterdir()) == [path]
    assert path.name.startswith("m_0_0-1.")  # the instance, and its version
    with gzip.open(path) as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    steps = [name for name in names if name.startswith("ProfilerStep#")]
    assert len(steps) == names.count("aten::neg") == PROFILED_BATCHES


def test_unloading_ends_the_profile(tmp_path: Path) -> None:
    served = _Served(tmp_path)
    served.model.finalize()
    assert list(served.traces.iterdir()) == []
    assert not torch._C._autograd._profiler_enabled()


def test_a_trace_that_cannot_be_written_costs_the_trace_only(tmp_path: Path) -> None:
    served = _Served(tmp_path)
    served.traces.rmdir()
    served.traces.touch()
    served.repeat(PROFILED_BATCHES + 3)
    assert sum("the profiler failed" in line for line in logged("warn")) == 1
