"""Requests of sequences through the adapter: reading, metrics and the thread."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import fake_triton
import models
import numpy as np
import pytest
import scenarios
import torch
from fake_triton import MetricFamily, TritonError, Turn
from torch import Tensor, nn

from torch_py_backend.adapter import TritonPythonModel, metrics, sequencing


class Loaded:
    """A model that sums the inputs of its sequences."""

    def __init__(
        self, folder: Path, definition: Any = models.Accumulate, **parameters: str
    ) -> None:
        text = scenarios.config(
            {"x": [4]},
            {"y": [4]},
            more=scenarios.sequencing(scenarios.state()),
        )
        scenario = scenarios.Scenario("sums", scenarios.python(definition), text)
        arguments = fake_triton.arguments(scenario.lay_out(folder))
        self.document = json.loads(arguments["model_config"])
        self.model = TritonPythonModel()
        self.model.initialize(arguments)

    def request(self, value: float, flags: str = "", **how: Any) -> Any:
        row = np.full((1, 4), value, dtype=np.float32)
        turn = Turn(7, "s" in flags, "e" in flags)
        made = fake_triton.request({"x": row}, self.document, "", turn)
        return fake_triton.InferenceRequest(made.inputs(), "", turn=turn, **how)

    def send(self, *requests: Any) -> list[Any]:
        return [_first(response) for response in self.model.execute(requests)]


def _first(response: Any) -> Any:
    if response.error() is not None:
        return response.error().code()
    (y,) = response.output_tensors()
    return float(y.as_numpy()[0, 0])


class _Unreadable(fake_triton.Tensor):
    def as_numpy(self) -> Any:
        raise ValueError("unpack requires 4 bytes")


def unreadable(flags: str) -> Any:
    tensor = _Unreadable("x", np.ones((1, 4), dtype=np.float32))
    return fake_triton.InferenceRequest([tensor], turn=Turn(7, "s" in flags, "e" in flags))


@pytest.mark.parametrize(
    ("flags", "after"), [("", 12), ("s", 7), ("e", TritonError.INVALID_ARG), ("se", 3)]
)
def test_a_request_that_cannot_be_read(
    flags: str, after: float, tmp_path: Path, process: None
) -> None:
    """It gets an error, and still begins or ends its sequence."""
    loaded = Loaded(tmp_path)
    assert loaded.send(loaded.request(5, "s")) == [5]

    assert loaded.send(unreadable(flags)) == [TritonError.INVALID_ARG]

    if flags == "se":
        assert loaded.send(loaded.request(7)) == [TritonError.INVALID_ARG]
        assert loaded.send(loaded.request(3, "s")) == [after]
    else:
        assert loaded.send(loaded.request(7)) == [after]


class Slow(nn.Module):
    def forward(self, x: Tensor, total: Tensor) -> dict[str, Tensor]:
        import time

        time.sleep(0.05)
        return {"y": total + x, "sum": total + x}


def test_a_cancelled_step_is_run(tmp_path: Path, process: None) -> None:
    """The next step needs its state."""
    loaded = Loaded(tmp_path, Slow)
    loaded.send(loaded.request(1, "s"))
    loaded.send(loaded.request(1, cancelled=True))

    assert loaded.send(loaded.request(1)) == [3]


def test_states_of_requests_are_not_read(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's memory for a state is uninitialized, and may not even be valid strings."""
    loaded = Loaded(tmp_path)
    sent = loaded.request(1, "s")
    names = [tensor.name() for tensor in sent.inputs()]
    broken = _Unreadable("total", np.ones((1, 4), dtype=np.float32))
    tensors = [one if one.name() == "x" else broken for one in sent.inputs()]

    assert names == ["x", "total"]
    assert loaded.send(fake_triton.InferenceRequest(tensors, turn=Turn(7, True, False))) == [1]


def _gauges() -> dict[str, list[float]]:
    return {
        name: [one.value() for one in MetricFamily.made[f"pytorch_py_{name}"]]
        for name in ("sequences", "sequence_bytes")
    }


def test_metrics_of_sequences(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metrics are published by the thread, and the sweeping thread ends with the model."""
    monkeypatch.setattr(metrics, "_SECONDS", 0.01)
    loaded = Loaded(tmp_path)
    loaded.send(loaded.request(1, "s"))
    _await({"sequences": [1], "sequence_bytes": [16]})
    loaded.send(loaded.request(1, "e"))
    _await({"sequences": [0], "sequence_bytes": [0]})

    (thread,) = [one for one in threading.enumerate() if one.name == "sequences"]
    loaded.model.finalize()
    loaded.model.close()
    assert not thread.is_alive()


def _await(wanted: dict[str, list[float]]) -> None:
    until = time.monotonic() + 60
    while _gauges() != wanted and time.monotonic() < until:
        time.sleep(0.01)
    assert _gauges() == wanted


# --- models with their own states --------------------------------------------------------------


def test_slots(tmp_path: Path, process: None) -> None:
    """Without states all slots are run: a row for each, zeros for empty ones."""
    text = scenarios.config(
        {"x": [4]},
        {"y": [4]},
        more=scenarios.sequencing(
            strategy="direct { }",
            controls=scenarios.control("START", "START", "fp32_false_true: [0, 1]")
            + scenarios.control("READY", "READY", "fp32_false_true: [0, 1]")
            + scenarios.control("END", "END", "int32_false_true: [0, 1]"),
        ),
    )
    scenario = scenarios.Scenario("slots", scenarios.python(models.Slots), text)
    arguments = fake_triton.arguments(scenario.lay_out(tmp_path))
    document = json.loads(arguments["model_config"])
    model = TritonPythonModel()
    model.initialize(arguments)

    def send(*turns: tuple[float, Turn]) -> list[float]:
        rows = [np.full((1, 4), value, dtype=np.float32) for value, _ in turns]
        sent = [
            fake_triton.request({"x": row}, document, "", turn)
            for row, (_, turn) in zip(rows, turns, strict=True)
        ]
        return [_first(response) for response in model.execute(sent)]

    nobody = (float("nan"), Turn(0))
    assert send((1, Turn(5, starts=True)), (10, Turn(6, starts=True))) == [1, 10]
    assert send(nobody, (10, Turn(6))) == [1, 20]
    assert send((1, Turn(5)), (10, Turn(6))) == [2, 30]


def test_fillers_of_every_kind_are_blank() -> None:
    """Of a request that only fills a slot, only controls reach the model."""
    steps = sequencing.SequenceReader.__new__(sequencing.SequenceReader)
    steps._sent = ["a", "b", "c"]
    item: dict[str, Any] = {
        "a": np.array([[np.nan]]),
        "b": np.array([[b"chance"]], dtype=np.object_),
        "c": torch.full((1, 1), 3.0, dtype=torch.bfloat16),
        "READY": np.array([[-1]]),
    }

    found = {name: value.tolist() for name, value in steps._blank(item).items()}

    assert found == {"a": [[0]], "b": [[b""]], "c": [[0]], "READY": [[-1]]}


@pytest.mark.parametrize("mode", ["true", "false"])
def test_compiled_graphs_serve_requests(mode: str, tmp_path: Path, process: None) -> None:
    """The warm-up's tensors are like those of requests: nothing runs eagerly."""
    compiled = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "eager"}'}
    text = scenarios.config(
        {"x": [4]},
        {"y": [4]},
        parameters={**compiled, "INFERENCE_MODE": mode},
        more=scenarios.sequencing(scenarios.state()),
    )
    scenario = scenarios.Scenario("compiled", scenarios.python(Adds), text)
    arguments = fake_triton.arguments(scenario.lay_out(tmp_path))
    document = json.loads(arguments["model_config"])
    model = TritonPythonModel()
    model.initialize(arguments)
    fake_triton.Logger.lines.clear()

    for flags in ("s", "", "e"):
        for rows in (1, 3):
            turns = [Turn(rows * 10 + row, "s" in flags, "e" in flags) for row in range(rows)]
            x = np.ones((1, 4), dtype=np.float32)
            model.execute([fake_triton.request({"x": x}, document, "", turn) for turn in turns])
    assert fake_triton.Logger.lines == []


class Adds(nn.Module):
    def forward(self, x: Tensor, total: Tensor) -> dict[str, Tensor]:
        return {"y": total + x, "sum": total + x}
