"""Requests of sequences through the adapter: reading, metrics and the thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_triton
import models
import numpy as np
import pytest
import scenarios
from fake_triton import MetricFamily, TritonError, Turn
from instances import Served, lose_device, unreadable, until
from scenarios import Scenario

from torch_py_backend.adapter import answering, metrics

pytestmark = pytest.mark.usefixtures("process")


class Loaded(Served):
    """A model of sequences: with a state `total` by default, that sums its inputs."""

    def __init__(
        self, folder: Path, definition: Any = models.Accumulate, more: str = "", **parameters: str
    ) -> None:
        more = more or scenarios.sequencing(scenarios.state())
        text = scenarios.config({"x": [4]}, {"y": [4]}, parameters=parameters, more=more)
        super().__init__(folder, Scenario("sums", scenarios.python(definition), text))

    def step(self, value: float, flags: str = "", id: int = 7, **how: Any) -> Any:  # noqa: A002  Triton's name
        row = np.full((1, 4), value, dtype=np.float32)
        return self.request({"x": row}, turn=Turn(id, "s" in flags, "e" in flags), **how)

    def run(self, *requests: Any) -> list[Any]:
        """Return the first value of each response, or the code of its error."""
        return [_first(response) for (response,) in self.send(*requests)]


def _first(response: Any) -> Any:
    if response.error() is not None:
        return response.error().code()
    (y,) = response.output_tensors()
    return float(y.as_numpy()[0, 0])


def bad(flags: str) -> Any:
    return unreadable(turn=Turn(7, "s" in flags, "e" in flags))


@pytest.mark.parametrize(
    ("flags", "after"), [("", 12), ("s", 7), ("e", TritonError.INVALID_ARG), ("se", 3)]
)
def test_a_request_that_cannot_be_read(flags: str, after: float, tmp_path: Path) -> None:
    """It still begins or ends its sequence."""
    loaded = Loaded(tmp_path)
    assert loaded.run(loaded.step(5, "s")) == [5]
    assert loaded.run(bad(flags)) == [TritonError.INVALID_ARG]
    if flags == "se":
        assert loaded.run(loaded.step(7)) == [TritonError.INVALID_ARG]
    again = loaded.step(3, "s") if flags == "se" else loaded.step(7)
    assert loaded.run(again) == [after]


def test_a_cancelled_step_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step needs its state. Live sequences are a metric."""
    monkeypatch.setattr(answering, "CHECK_CANCELLED_S", -1)  # batches take long
    monkeypatch.setattr(metrics, "_SECONDS", 0.01)
    loaded = Loaded(tmp_path)
    (metric,) = MetricFamily.made["pytorch_py_sequences"]
    loaded.run(loaded.step(1, "s"))
    until(lambda: metric.value() == 1)
    loaded.run(loaded.step(1, cancelled=True))
    assert loaded.run(loaded.step(1, "e")) == [3]
    until(lambda: metric.value() == 0)


def test_states_of_requests_are_not_read(tmp_path: Path) -> None:
    """Triton's memory for a state is uninitialized, and may not even be valid strings."""
    loaded = Loaded(tmp_path)
    x, total = loaded.step(1, "s").inputs()
    (state,) = unreadable(name=total.name()).inputs()
    assert loaded.run(fake_triton.InferenceRequest([x, state], turn=Turn(7, True, False))) == [1]


_SLOTS = scenarios.sequencing(
    strategy="direct { }",
    controls=scenarios.control("START", "START", "fp32_false_true: [0, 1]")
    + scenarios.control("READY", "READY", "fp32_false_true: [0, 1]")
    + scenarios.control("END", "END", "int32_false_true: [0, 1]"),
)


def test_slots(tmp_path: Path) -> None:
    """Without states all slots are run, with zeros for empty ones; or none if one is refused."""
    loaded = Loaded(tmp_path, models.Slots, _SLOTS)

    def send(flags: str, *steps: tuple[int, float]) -> list[Any]:
        return loaded.run(*(loaded.step(value, flags, id=name) for name, value in steps))

    assert send("s", (5, 1), (6, 10), (7, 5)) == [1, 10, 5]
    assert send("", (0, np.nan), (6, 10)) == [1, 20]
    refused, others = TritonError.INVALID_ARG, TritonError.UNAVAILABLE
    for flags in ("", "s"):
        batch = loaded.step(1, id=5), bad(flags), loaded.step(1, id=7)
        assert loaded.run(*batch) == [others, refused, others]
    # What was not run is sent again: a row less would have shifted the slots.
    assert send("", (5, 1), (6, 10), (7, 5)) == [2, 30, 10]


def test_a_device_that_is_lost_while_requests_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request of the batch gets 503, those read before it, too."""
    loaded = Loaded(tmp_path)
    lose_device(monkeypatch)
    sent = loaded.step(1, "s", id=5), bad("s"), loaded.step(2, "s", id=6)
    assert loaded.run(*sent) == [TritonError.UNAVAILABLE] * 3


@pytest.mark.parametrize("mode", ["true", "false"])
def test_compiled_graphs_serve_requests(mode: str, tmp_path: Path) -> None:
    """The warm-up's tensors are like those of requests: nothing runs eagerly."""
    compiled = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "eager"}'}
    loaded = Loaded(tmp_path, INFERENCE_MODE=mode, **compiled)
    for flags in ("s", "", "e"):
        for rows in (1, 3):
            loaded.run(*(loaded.step(1, flags, id=rows * 10 + row) for row in range(rows)))
    assert fake_triton.Logger.lines == []
