"""Traces of the profiler: what is in them, when a model that serves writes them, refusals."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fake_triton
import hooked
import models
import numpy as np
import pytest
import ranges
import scenarios
import streamed
import torch
from ranges import Range
from scenarios import Scenario

from torch_py_backend import pbtxt, profiling
from torch_py_backend.adapter import TritonPythonModel
from torch_py_backend.errors import BackendError, ConfigError

_NEGATE = Scenario(
    "negate", scenarios.python(models.Negate), scenarios.config({"x": [4]}, {"y": [4]})
)
_SECONDS = 60


def _run(folder: Path, scenario: Scenario, batches: int = 2, **how: Any) -> tuple[Any, list[Range]]:
    """What is told of a model's batches, and the ranges of their trace."""
    model = scenario.lay_out(folder)
    output = folder / "trace.json.gz"
    found = profiling.run(
        pbtxt.arguments(model, "1", pbtxt.read(model)),
        batches,
        how.get("requests"),
        how.get("inputs"),
        str(output),
        memory=how.get("memory", False),
    )
    json.dumps(found, allow_nan=False)  # it is handed on as JSON
    assert sorted(path.name for path in folder.iterdir()) == [scenario.name, "trace.json.gz"]
    return found, ranges.read(output)


def _named(table: Sequence[Scenario], name: str) -> Scenario:
    return next(one for one in table if one.name == name)


def test_stages(process: None, tmp_path: Path) -> None:
    """Each batch is a range, with its stages in their order and the operators in theirs."""
    found, came = _run(tmp_path, _NEGATE, batches=3, requests=4)
    stages = ["group", "call", "gather", "host to device", "convert", "forward", "outputs"]
    stages += ["device to host", "scatter"]
    assert [one.name for one in came] == ["batch", *stages] * 3
    around = {one.name: one.within for one in came}
    assert around["batch"] == ()
    assert around["group"] == around["call"] == ("batch",)
    assert {around[name] for name in stages[2:]} == {("batch", "call")}
    assert [one.name for one in came if "aten::neg" in one.operators] == [
        "batch",
        "call",
        "forward",
    ] * 3
    assert {"aten::split_with_sizes"} <= next(o for o in came if o.name == "scatter").operators
    told = [(one["stage"], one["depth"], one["calls"]) for one in found["stages"]]
    depths = [1, 1, *[2] * 7]
    assert told == [("batch", 0, 3), *((n, d, 3) for n, d in zip(stages, depths, strict=True))]
    whole, *parts = found["stages"]
    assert sum(one["ms"] for one in parts if one["depth"] == 1) <= whole["ms"]
    (negated,) = [one for one in found["operators"] if one["operator"] == "aten::neg"]
    assert negated["calls"] == 3
    assert (found["requests"], found["device"], found["inputs"]) == (4, "cpu", "made-up values")
    assert not any(one["operator"].startswith(profiling.PREFIX) for one in found["operators"])


def test_hooks(process: None, tmp_path: Path) -> None:
    """The methods around forward() are ranges of their names: for each row, or each batch."""
    found, came = _run(tmp_path, _named(hooked.TABLE, "hooks_counts"), requests=2)
    order = [one.name for one in came if one.name in ("preprocess", "forward", "postprocess")]
    assert order == ["preprocess", "preprocess", "forward", "postprocess", "postprocess"] * 2
    assert {one.within for one in came if one.name == "preprocess"} == {("batch", "prepare")}
    assert {one.within for one in came if one.name == "postprocess"} == {("batch", "finish")}
    assert {"preprocess", "postprocess"} <= {one["stage"] for one in found["stages"]}


def test_streams(process: None, tmp_path: Path) -> None:
    """Of a decoupled model a batch is a stream's first responses."""
    scenario = streamed.TABLE[0].scenario
    _, came = _run(tmp_path, scenario)
    assert [one.name for one in came].count("batch") == 2
    assert {one.within for one in came if one.name == "forward"} == {("batch",)}
    assert {"outputs", "gather"} <= {one.name for one in came}


def test_memory(process: None, tmp_path: Path) -> None:
    """What operators allocate is told where it was asked for."""
    found, _ = _run(tmp_path, _NEGATE, memory=True)
    assert any(one["memory_mb"] > 0 for one in found["operators"])


def test_without_a_batch_dimension(process: None, tmp_path: Path) -> None:
    """A model that does not batch is called with one request."""
    text = scenarios.config({"x": [4]}, {"y": [4]}, max_batch_size=0)
    found, came = _run(tmp_path, Scenario("negate", scenarios.python(models.Negate), text))
    assert found["requests"] == 1
    assert [one.name for one in came].count("batch") == 2


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"requests": 9}, "a batch of 9 is asked for, and max_batch_size is 8"),
        ({"inputs": "/no/such.safetensors"}, "the inputs in such.safetensors cannot be read"),
    ],
)
def test_refusals(how: dict[str, Any], says: str, process: None, tmp_path: Path) -> None:
    """What does not fit the model is said in a sentence, and nothing is written."""
    with pytest.raises(BackendError, match=says):
        _run(tmp_path, _NEGATE, **how)
    assert [path.name for path in tmp_path.iterdir()] == ["negate"]


def test_batches_that_fail(process: None, tmp_path: Path) -> None:
    """A model whose batches fail is told so; there is no trace of errors."""
    code = models.source(models.Raises).replace("(x < 0)", "(x < 2)")
    text = scenarios.config({"x": [4]}, {"y": [4]}, parameters={"WARMUP": "false"})
    with pytest.raises(BackendError, match=r"a batch of 8 failed: .* ValueError: negative"):
        _run(tmp_path, Scenario("raises", scenarios.text(code), text))
    assert [path.name for path in tmp_path.iterdir()] == ["raises"]


def test_a_trace_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Where the profiler leaves half a file, as on a full disk, an older trace stays."""

    class Half:
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text('{"traceEvents": [')

    (tmp_path / "trace.json").write_text("older")
    half: Any = Half()
    with pytest.raises(OSError, match="not written to its end"):
        profiling.write(half, tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert (tmp_path / "trace.json").read_text() == "older"


# --- while it serves ---------------------------------------------------------------------------


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
    profiles = profiling.Profiles(engine)
    asking.join()
    assert "_run" not in vars(engine)
    profiles.close()


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

    monkeypatch.setattr(profiling, "Recording", refuses)
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
