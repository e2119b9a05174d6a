"""A model's batches, profiled without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hooked
import models
import pytest
import ranges
import scenarios
import streamed
from ranges import Range
from scenarios import Scenario

from torch_py_backend.config import pbtxt
from torch_py_backend.errors import BackendError
from torch_py_backend.observability import trace_recording
from torch_py_backend.tools import profiling

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
    assert not any(one["operator"].startswith(trace_recording.PREFIX) for one in found["operators"])


def test_hooks(process: None, tmp_path: Path) -> None:
    """The methods around forward() are ranges of their names: for each row, or each batch."""
    found, came = _run(tmp_path, _named(hooked.TABLE, "hooks_counts"), requests=2)
    order = [one.name for one in came if one.name in ("preprocess", "forward", "postprocess")]
    assert order == ["preprocess", "preprocess", "forward", "postprocess", "postprocess"] * 2
    assert {one.within for one in came if one.name == "preprocess"} == {("batch", "prepare")}
    assert {one.within for one in came if one.name == "postprocess"} == {("batch", "finish")}
    assert {"preprocess", "postprocess"} <= {one["stage"] for one in found["stages"]}


@pytest.mark.parametrize(
    ("name", "stage"), [("ticker", "next"), ("asynchronous", "next"), ("continuous", "step")]
)
def test_streams(name: str, stage: str, process: None, tmp_path: Path) -> None:
    """Of a decoupled model a batch is a stream's first responses, and how it came to them."""
    _, came = _run(tmp_path, _named([one.scenario for one in streamed.TABLE], name))
    assert [one.name for one in came].count("batch") == 2
    assert {one.within for one in came if one.name in ("forward", stage)} == {("batch",)}
    assert {one.name for one in came} & {"next", "step"} == {stage}
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
