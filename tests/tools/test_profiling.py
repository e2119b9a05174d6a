"""Batches of a model, profiled without a server."""

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
from torch_py_backend.observability.profiling import PREFIX
from torch_py_backend.tools import profiling

_NEGATE = Scenario(
    "negate", scenarios.python(models.Negate), scenarios.config({"x": [4]}, {"y": [4]})
)
_SECONDS = 60


def _run(
    folder: Path, scenario: Scenario, batches: int = 2, **options: Any
) -> tuple[Any, list[Range]]:
    """Profile a model; return the summary and the ranges of the trace."""
    model = scenario.lay_out(folder)
    output = folder / "trace.json.gz"
    summary = profiling.run(
        pbtxt.arguments(model, "1", pbtxt.read(model)),
        batches,
        options.get("requests"),
        options.get("inputs"),
        str(output),
        memory=options.get("memory", False),
    )
    json.dumps(summary, allow_nan=False)  # sent to the parent process as JSON
    assert sorted(path.name for path in folder.iterdir()) == [scenario.name, "trace.json.gz"]
    return summary, ranges.read(output)


def _named(table: Sequence[Scenario], name: str) -> Scenario:
    return next(scenario for scenario in table if scenario.name == name)


def test_stages(process: None, tmp_path: Path) -> None:
    """Each batch is a range that contains its stages in order; operators lie in their stage."""
    summary, stages = _run(tmp_path, _NEGATE, batches=3, requests=4)
    names = ["group", "call", "gather", "host to device", "convert", "forward", "outputs"]
    names += ["device to host", "scatter"]
    assert [stage.name for stage in stages] == ["batch", *names] * 3
    within = {stage.name: stage.within for stage in stages}
    assert within["batch"] == ()
    assert within["group"] == within["call"] == ("batch",)
    assert {within[name] for name in names[2:]} == {("batch", "call")}
    negating = [stage.name for stage in stages if "aten::neg" in stage.operators]
    assert negating == ["batch", "call", "forward"] * 3
    scatter = next(stage for stage in stages if stage.name == "scatter")
    assert {"aten::split_with_sizes"} <= scatter.operators
    rows = [(row["stage"], row["depth"], row["calls"]) for row in summary["stages"]]
    depths = [1, 1, *[2] * 7]
    assert rows == [("batch", 0, 3), *((n, d, 3) for n, d in zip(names, depths, strict=True))]
    total, *parts = summary["stages"]
    assert sum(row["ms"] for row in parts if row["depth"] == 1) <= total["ms"]
    (negate,) = [row for row in summary["operators"] if row["operator"] == "aten::neg"]
    assert negate["calls"] == 3
    assert (summary["requests"], summary["device"]) == (4, "cpu")
    assert summary["inputs"] == "made-up values"
    assert not any(row["operator"].startswith(PREFIX) for row in summary["operators"])


def test_hooks(process: None, tmp_path: Path) -> None:
    """Each hook is a range of its name: one for each row, or one for each batch."""
    counts = Scenario("counts", hooked.model(hooked.COUNTS), hooked.COUNTS_CONFIG)
    summary, stages = _run(tmp_path, counts, requests=2)
    steps = ("preprocess", "forward", "postprocess")
    order = [stage.name for stage in stages if stage.name in steps]
    assert order == ["preprocess", "preprocess", "forward", "postprocess", "postprocess"] * 2
    assert {stage.within for stage in stages if stage.name == "preprocess"} == {
        ("batch", "prepare")
    }
    assert {stage.within for stage in stages if stage.name == "postprocess"} == {
        ("batch", "finish")
    }
    assert {"preprocess", "postprocess"} <= {row["stage"] for row in summary["stages"]}


@pytest.mark.parametrize(
    ("name", "resume"), [("ticker", "next"), ("asynchronous", "next"), ("continuous", "step")]
)
def test_streams(name: str, resume: str, process: None, tmp_path: Path) -> None:
    """A batch of a decoupled model is the first responses of a stream."""
    _, stages = _run(tmp_path, _named([case.scenario for case in streamed.TABLE], name))
    assert [stage.name for stage in stages].count("batch") == 2
    assert {stage.within for stage in stages if stage.name in ("forward", resume)} == {("batch",)}
    names = {stage.name for stage in stages}
    assert names & {"next", "step"} == {resume}
    assert names >= {"outputs", "gather"}


def test_without_a_batch_dimension(process: None, tmp_path: Path) -> None:
    """A model that does not batch is called with one request; allocations are recorded."""
    text = scenarios.config({"x": [4]}, {"y": [4]}, max_batch_size=0)
    scenario = Scenario("negate", scenarios.python(models.Negate), text)
    summary, stages = _run(tmp_path, scenario, memory=True)
    assert summary["requests"] == 1
    assert [stage.name for stage in stages].count("batch") == 2
    assert any(row["memory_mb"] > 0 for row in summary["operators"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests": 9}, "--batch-size is 9, and max_batch_size is 8"),
        ({"inputs": "/no/such.safetensors"}, "such.safetensors cannot be read"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, process: None, tmp_path: Path) -> None:
    """Options that do not fit the model raise an error, and nothing is written."""
    with pytest.raises(BackendError, match=message):
        _run(tmp_path, _NEGATE, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["negate"]


def test_batches_that_fail(process: None, tmp_path: Path) -> None:
    """If batches fail, the error is raised and no trace is written."""
    code = models.source(models.Raises).replace("(x < 0)", "(x < 2)")
    text = scenarios.config({"x": [4]}, {"y": [4]}, parameters={"WARMUP": "false"})
    with pytest.raises(BackendError, match=r"a batch of 8 failed: .* ValueError: negative"):
        _run(tmp_path, Scenario("raises", scenarios.text(code), text))
    assert [path.name for path in tmp_path.iterdir()] == ["raises"]
