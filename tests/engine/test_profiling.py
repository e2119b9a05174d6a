"""Traces of a model that serves with PROFILE_DIR."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import models
import pytest
import scenarios
import torch
from instances import Served, logged, request
from scenarios import Scenario

from torch_py_backend.engine.profiling import BATCHES

_YIELDS = """\
class Yields(nn.Module):
    def forward(self, x: Tensor):
        for _ in range(4):
            x = -x
            yield x
"""

pytestmark = pytest.mark.usefixtures("process")


class _Served(Served):
    def __init__(self, folder: Path, *, decoupled: bool = False) -> None:
        self.traces = folder / "traces"
        self.traces.mkdir()
        config = scenarios.x_to_y(PROFILE_DIR=str(self.traces))
        source = scenarios.python(models.Negate)
        if decoupled:
            config += "model_transaction_policy { decoupled: true }\n"
            source = scenarios.text(models.source() + _YIELDS)
        super().__init__(folder, Scenario("m", source, config))

    def repeat(self, times: int) -> None:
        for _ in range(times):
            (responses,) = self.send(request(1))
            assert all(response.error() is None for response in responses)

    def trace_files(self) -> list[Path]:
        return sorted(self.traces.iterdir())


def _names(path: Path) -> Iterator[str]:
    """Yield the names of the events that are within the range of a batch."""
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    times = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    batches = [span for span, event in zip(times, events, strict=True) if event["name"] == "batch"]
    for (begin, end), event in zip(times, events, strict=True):
        if any(first <= begin and end <= last for first, last in batches):
            yield event["name"]


def test_the_first_batches_after_ready_are_profiled_except_one(tmp_path: Path) -> None:
    served = _Served(tmp_path)
    served.repeat(BATCHES)
    assert served.trace_files() == []
    served.repeat(3)
    (path,) = served.trace_files()
    served.model.finalize()
    assert served.trace_files() == [path]
    assert path.name.startswith("m_0_0-1.")  # the instance, and its version
    names = list(_names(path))
    assert names.count("batch") == names.count("aten::neg") == BATCHES


def test_each_call_of_a_decoupled_model_is_a_batch(tmp_path: Path) -> None:
    served = _Served(tmp_path, decoupled=True)
    served.repeat(BATCHES)
    served.model.finalize()
    (path,) = served.trace_files()
    names = list(_names(path))
    assert names.count("batch") == BATCHES
    assert BATCHES / 2 < names.count("aten::neg") <= BATCHES


@pytest.mark.parametrize("decoupled", [False, True])
def test_unloading_ends_the_profile(decoupled: bool, tmp_path: Path) -> None:
    served = _Served(tmp_path, decoupled=decoupled)
    served.model.finalize()
    assert served.trace_files() == []
    assert not torch._C._autograd._profiler_enabled()


def test_a_trace_that_cannot_be_written_costs_the_trace_only(tmp_path: Path) -> None:
    served = _Served(tmp_path)
    served.traces.rmdir()
    served.traces.touch()
    served.repeat(BATCHES + 3)
    assert sum("the profiler failed" in line for line in logged("warn")) == 1
