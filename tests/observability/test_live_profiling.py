"""Traces of a model that serves: when they are written, and that no request suffers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_triton
import models
import numpy as np
import pytest
import ranges
import scenarios
import torch
from scenarios import Scenario

from torch_py_backend.adapter import TritonPythonModel
from torch_py_backend.errors import BackendError, ConfigError
from torch_py_backend.observability import live_profiling

_SECONDS = 60


class _Served:
    """A model that was loaded through the adapter, with PROFILE_DIR."""

    def __init__(self, folder: Path, definition: Any = models.Negate, **parameters: str) -> None:
        self.traces = folder / "traces"
        self.traces.mkdir()
        wished = {"PROFILE_DIR": str(self.traces), "PROFILE_BATCHES": "2"} | parameters
        text = scenarios.config({"x": [4]}, {"y": [4]}, parameters=wished)
        scenario = Scenario("negate", scenarios.python(definition), text)
        self.model = TritonPythonModel()
        self.model.initialize(fake_triton.arguments(scenario.lay_out(folder)))

    def ask(self, times: int) -> None:
        x = np.ones((1, 4), dtype=np.float32)
        for _ in range(times):
            request = fake_triton.InferenceRequest([fake_triton.Tensor("x", x)])
            (response,) = self.model.execute([request])
            assert response.error() is None

    def written(self) -> list[Path]:
        return sorted(self.traces.glob("*.json.gz"))


def _wait(done: Callable[[], Any]) -> None:
    until = time.monotonic() + _SECONDS
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_first_batches(process: None, tmp_path: Path) -> None:
    """The first batches after READY are profiled, without those of the warm-up, and no others."""
    served = _Served(tmp_path)
    served.ask(1)
    assert served.written() == []
    served.ask(4)
    _wait(served.written)
    served.model.finalize()
    (path,) = served.written()
    assert path.name.startswith("negate_0_0-1-")  # the instance, and its version
    came = [one.name for one in ranges.read(path)]
    assert came.count("batch") == came.count("forward") == came.count("gather") == 2
    assert [one.name for one in served.traces.iterdir()] == [path.name]


def test_again(process: None, tmp_path: Path) -> None:
    """Whoever may write to the folder has another trace by touching a file there."""
    served = _Served(tmp_path)
    served.ask(2)
    _wait(served.written)
    (first,) = served.written()
    first.rename(first.with_suffix(".old"))
    stamp = served.traces / "again"
    stamp.touch()
    os.utime(stamp, (1, 1))  # an older time than any is one, too

    def asked() -> list[Path]:
        served.ask(1)
        return served.written()

    _wait(asked)
    assert len(served.written()) == 1
    assert [one.name for one in ranges.read(served.written()[0])].count("batch") == 2


def test_nothing_stands_around_afterwards(process: None, tmp_path: Path) -> None:
    """Before and after a trace the stages are the engine's own: what is off costs nothing."""
    served = _Served(tmp_path, PROFILE_BATCHES="1", TRACING="false")
    engine = served.model._engine
    during = engine.__dict__.keys()
    served.ask(1)
    assert not {"_run", "_attempt", "_scatter"} & engine.__dict__.keys()
    assert engine.callee.module is engine.loaded.module
    assert during >= {"_gather", "_to_device", "_to_host"}


def test_a_batch_that_ends_while_a_trace_is_asked_for(process: None, tmp_path: Path) -> None:
    """The last batch may have ended before who asks for a trace is done: nothing stays around."""
    served = _Served(tmp_path, PROFILE_BATCHES="1", TRACING="false")
    served.ask(1)
    engine = served.model._engine
    surround = engine.surround
    asking = threading.Thread(target=served.ask, args=(1,))

    def surrounding(around: Any) -> Callable[[], None]:
        restore = surround(around)
        asking.start()
        _wait(lambda: around.__self__._left == 0)
        return restore

    engine.surround = surrounding  # type: ignore[method-assign]
    armed = live_profiling.Profiles(engine)
    asking.join()
    assert "_run" not in vars(engine)
    armed.close()


def test_ended_in_mid_trace(process: None, tmp_path: Path) -> None:
    """A model that is unloaded before it has all its batches leaves nothing half-written."""
    served = _Served(tmp_path)
    served.ask(1)
    served.model.finalize()
    assert list(served.traces.iterdir()) == []
    assert not torch._C._autograd._profiler_enabled()


def test_no_request_suffers(process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the profiler cannot begin, requests are answered, and the log has the reason once."""
    served = _Served(tmp_path)

    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr(live_profiling, "Recording", refuses)
    served.ask(3)
    told = [text for level, text in fake_triton.Logger.lines if "profiler" in text]
    assert [text.count("cannot be begun: RuntimeError: Profiler is al") for text in told] == [1]
    assert served.written() == []


def test_folder_that_goes(process: None, tmp_path: Path) -> None:
    """A folder that is removed while the model serves costs the trace, and nothing else."""
    served = _Served(tmp_path, PROFILE_BATCHES="1")
    served.traces.rmdir()
    served.ask(3)
    _wait(lambda: any("cannot be written" in text for _, text in fake_triton.Logger.lines))
    served.ask(1)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"PROFILE_DIR": "traces"}, "PROFILE_DIR is 'traces'. Give an absolute path"),
        ({"PROFILE_DIR": "/no/such/folder"}, "cannot be written to: No such file or directory"),
        ({"PROFILE_DIR": "/dev/null"}, "cannot be written to: Not a directory"),
        ({"PROFILE_DIR": "/proc"}, "expected a folder that is there, and that the server's user"),
        ({"PROFILE_BATCHES": "3"}, "PROFILE_BATCHES is set, and PROFILE_DIR is not"),
        ({"PROFILE_DIR": "/tmp", "PROFILE_BATCHES": "0"}, "the parameter PROFILE_BATCHES is '0'"),
    ],
)
def test_bad_parameters(
    parameters: dict[str, str], says: str, process: None, tmp_path: Path
) -> None:
    """A folder that is no place for traces fails the load, before the model is loaded."""
    text = scenarios.config({"x": [4]}, {"y": [4]}, parameters=parameters)
    scenario = Scenario("negate", scenarios.text("raise SystemExit"), text)
    with pytest.raises(fake_triton.TritonModelException) as refusal:
        TritonPythonModel().initialize(fake_triton.arguments(scenario.lay_out(tmp_path)))
    assert says in str(refusal.value)
    assert issubclass(ConfigError, BackendError)
