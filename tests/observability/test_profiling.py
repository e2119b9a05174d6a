"""Traces of batches: as files, and of a model that serves."""

from __future__ import annotations

import os
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
from torch_py_backend.observability import profiling

_SECONDS = 60


class _Served:
    """A model that was loaded through the adapter, with PROFILE_DIR."""

    def __init__(self, folder: Path, definition: Any = models.Negate, **parameters: str) -> None:
        self.traces = folder / "traces"
        self.traces.mkdir()
        parameters = {"PROFILE_DIR": str(self.traces), "PROFILE_BATCHES": "2"} | parameters
        text = scenarios.config({"x": [4]}, {"y": [4]}, parameters=parameters)
        scenario = Scenario("negate", scenarios.python(definition), text)
        self.model = TritonPythonModel()
        self.model.initialize(fake_triton.arguments(scenario.lay_out(folder)))

    def send(self, times: int) -> None:
        x = np.ones((1, 4), dtype=np.float32)
        for _ in range(times):
            request = fake_triton.InferenceRequest([fake_triton.Tensor("x", x)])
            (response,) = self.model.execute([request])
            assert response.error() is None

    def trace_files(self) -> list[Path]:
        return sorted(self.traces.glob("*.json.gz"))


def _wait(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_first_batches(process: None, tmp_path: Path) -> None:
    """Only the first batches after READY are profiled; those of the warm-up are not."""
    served = _Served(tmp_path)
    served.send(1)
    assert served.trace_files() == []
    served.send(4)
    _wait(served.trace_files)
    served.model.finalize()
    (path,) = served.trace_files()
    assert path.name.startswith("negate_0_0-1-")  # the instance, and its version
    names = [stage.name for stage in ranges.read(path)]
    assert names.count("batch") == names.count("forward") == names.count("gather") == 2
    assert [file.name for file in served.traces.iterdir()] == [path.name]


def test_touching_again_records_another_trace(process: None, tmp_path: Path) -> None:
    """Touching the file `again` in PROFILE_DIR records another trace."""
    served = _Served(tmp_path)
    served.send(2)
    _wait(served.trace_files)
    (first,) = served.trace_files()
    first.rename(first.with_suffix(".old"))
    stamp = served.traces / "again"
    stamp.touch()
    os.utime(stamp, (1, 1))  # an older time is a change, too

    def files_after_request() -> list[Path]:
        served.send(1)
        return served.trace_files()

    _wait(files_after_request)
    assert len(served.trace_files()) == 1
    assert [stage.name for stage in ranges.read(served.trace_files()[0])].count("batch") == 2


def test_stages_are_restored_after_a_trace(process: None, tmp_path: Path) -> None:
    """After a trace, the stages are the engine's own again and cost nothing."""
    served = _Served(tmp_path, PROFILE_BATCHES="1", TRACING="false")
    engine = served.model._engine
    assert engine._run.call != engine._run_items
    others = [stage.call for stage in engine._stages if stage is not engine._run]
    served.send(1)
    _wait(lambda: engine._run.call == engine._run_items)
    assert engine.runner.forward.call is engine.loaded.module
    assert len(others) > 10
    assert [stage.call for stage in engine._stages if stage is not engine._run] == others


def test_unloading_discards_an_incomplete_trace(process: None, tmp_path: Path) -> None:
    """A model that is unloaded before the last batch of a trace writes nothing."""
    served = _Served(tmp_path)
    served.send(1)
    served.model.finalize()
    assert list(served.traces.iterdir()) == []
    assert not torch._C._autograd._profiler_enabled()


def test_requests_are_answered_if_the_profiler_fails(
    process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the profiler cannot start, requests are answered, and the reason is logged once."""
    served = _Served(tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr(profiling, "Recording", fail)
    served.send(3)
    logged = [text for _, text in fake_triton.Logger.lines if "profiler" in text]
    assert [text.count("cannot be started: RuntimeError: Profiler is al") for text in logged] == [1]
    assert served.trace_files() == []


def test_a_removed_folder_costs_the_trace_only(process: None, tmp_path: Path) -> None:
    """If PROFILE_DIR is removed while the model serves, requests are answered, without a trace."""
    served = _Served(tmp_path, PROFILE_BATCHES="1")
    served.traces.rmdir()
    served.send(3)
    _wait(lambda: any("cannot be written" in text for _, text in fake_triton.Logger.lines))
    served.send(1)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"PROFILE_DIR": "traces"}, "PROFILE_DIR is 'traces'. Give an absolute path"),
        ({"PROFILE_DIR": "/no/such/folder"}, "cannot be written to: No such file or directory"),
        ({"PROFILE_DIR": "/dev/null"}, "to: Not a directory; expected an existing folder that the"),
        ({"PROFILE_BATCHES": "3"}, "PROFILE_BATCHES is set, and PROFILE_DIR is not"),
    ],
)
def test_bad_parameters(
    parameters: dict[str, str], message: str, process: None, tmp_path: Path
) -> None:
    """A PROFILE_DIR that is not writable fails the load before the model is loaded."""
    text = scenarios.config({"x": [4]}, {"y": [4]}, parameters=parameters)
    scenario = Scenario("negate", scenarios.text("raise SystemExit"), text)
    with pytest.raises(fake_triton.TritonModelException) as error:
        TritonPythonModel().initialize(fake_triton.arguments(scenario.lay_out(tmp_path)))
    assert message in str(error.value)


def test_a_trace_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """If the profiler writes half a file, as on a full disk, the older trace is kept."""

    class Truncating:
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text('{"traceEvents": [')

    (tmp_path / "trace.json").write_text("older")
    profiler: Any = Truncating()
    with pytest.raises(OSError, match="not written to its end"):
        profiling.write(profiler, tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert (tmp_path / "trace.json").read_text() == "older"
