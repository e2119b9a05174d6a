"""A request has the same answer alone, in a batch, and after a failure of another request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fake_triton
import models
import pytest
import scenarios
from fake_triton import TritonError
from instances import load, request
from scenarios import Scenario, floats, tensor
from torch import Tensor, nn

from torch_py_backend.adapter import TritonPythonModel, answering

pytestmark = pytest.mark.usefixtures("process")


class Keywords(nn.Module):
    """Takes an argument by keyword; inputs are bound by name."""

    def forward(self, a: Tensor, *, b: Tensor) -> Tensor:
        return a - 2 * b


class Case(NamedTuple):
    """A model; `hooks` are the code of its class Hooks, `parameters` its options."""

    definition: type[nn.Module]
    inputs: str
    outputs: str
    parameters: dict[str, str] = {}  # noqa: RUF012  a field's default, never changed
    hooks: str = ""


_X, _Y = tensor("input", "x", [4]), tensor("output", "y", [4])
_CASES = {
    "one input": Case(models.Negate, _X, _Y),
    "open dims": Case(models.Negate, tensor("input", "x", [-1, 3]), tensor("output", "y", [-1, 3])),
    "by keyword": Case(Keywords, tensor("input", "b", [4]) + tensor("input", "a", [4]), _Y),
    "one row in a call": Case(models.Negate, _X, _Y, {"BATCH_BUCKETS": "1"}),
}


def _plain(folder: Path, case: Case) -> TritonPythonModel:
    tensors = case.inputs + case.outputs
    text = scenarios.config({}, {}, parameters=case.parameters, more=tensors + _CPU)
    write = scenarios.hooked(models.source(case.definition) + case.hooks)
    return load(folder, Scenario("plain", write, text))


_CPU = "instance_group [{ kind: KIND_CPU count: 1 }]\n"


def _request(shapes: dict[str, tuple[int, ...]], seed: int) -> Any:
    return fake_triton.InferenceRequest(
        [
            fake_triton.Tensor(name, floats(*shape, seed=seed + place))
            for place, (name, shape) in enumerate(shapes.items())
        ]
    )


def _contents(responses: Sequence[Any]) -> list[object]:
    """Return what clients would see of the responses."""
    return [
        response.error().message()
        if response.has_error()
        else {part.name(): part.as_numpy().tolist() for part in response.output_tensors()}
        for response in responses
    ]


def _alone(model: TritonPythonModel, requests: Sequence[Any]) -> list[object]:
    return [content for one in requests for content in _contents(model.execute([one]))]


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        pytest.param("open dims", [{"x": (1, 2, 3)}, {"x": (1, 5, 3)}], id="other dims"),
        pytest.param("one row in a call", [{"x": (3, 4)}, {"x": (1, 4)}], id="a row in a call"),
        pytest.param("by keyword", [{"a": (1, 4), "b": (2, 4)}], id="rows of one request"),
        pytest.param(
            "by keyword",
            [{"a": (1, 4), "b": (2, 4)}, {"a": (2, 4), "b": (1, 4)}],
            id="rows of two requests, the same in sum",
        ),
        pytest.param("one input", [{"x": (4,)}, {"x": (4,)}], id="no rows in a batch"),
        pytest.param("one input", [{}], id="no input"),
    ],
)
def test_unusual_batches(
    name: str, shapes: list[dict[str, tuple[int, ...]]], tmp_path: Path
) -> None:
    """Each request has its result, in a call of its shape, or is refused."""
    model = _plain(tmp_path, _CASES[name])
    requests = [_request(sizes, seed) for seed, sizes in enumerate(shapes)]
    expected = _alone(model, requests)
    assert isinstance(expected[0], str) == (name in ("by keyword", "one input"))
    assert _contents(model.execute(requests)) == expected


class Moody(nn.Module):
    """Keeps the rows of its calls; fails in a way that the first value chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(x.shape[0])
        if (x == -1).any():
            raise ValueError("negative")
        if (x == -2).any():
            raise KeyboardInterrupt
        if (x == -3).any():

            class Whole(Tensor):
                def split_with_sizes(self, *args: Any, **kwargs: Any) -> Any:
                    raise TypeError("no rows")

            return (2 * x).as_subclass(Whole)
        return 2 * x


_RETURNS = """
class Hooks:
    def postprocess_batch(self, result):
        return result
"""


@pytest.mark.parametrize(
    ("values", "failed", "calls"),
    [
        pytest.param([1, -1, 2, 3], [False, True, False, False], None, id="a request"),
        pytest.param([1, -2], [True, True], [2], id="an interrupt"),
        pytest.param([1, -3], [False, False], [2], id="outputs of a subclass of Tensor"),
    ],
)
@pytest.mark.parametrize("hooks", ["", _RETURNS], ids=["direct", "with stages"])
def test_failed_calls(
    values: list[int], failed: list[bool], calls: list[int] | None, hooks: str, tmp_path: Path
) -> None:
    """Only requests that fail alone get an error; each call of the model is counted once."""
    model = _plain(tmp_path, Case(Moody, _X, _Y, hooks=hooks))
    module: Any = model._engine.loaded.module
    requests = [request(value) for value in values]
    module.calls.clear()
    rows = model._engine.counts.rows
    contents = _contents(model.execute(requests))
    assert [isinstance(content, str) for content in contents] == failed
    assert model._engine.counts.rows - rows == sum(module.calls)
    if calls is not None:
        assert module.calls == calls


def test_after_a_slow_failure_requests_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The duration of a failed batch decides, too, whether to look for cancelled requests."""
    model = _plain(tmp_path, Case(Moody, _X, _Y))
    monkeypatch.setattr(answering, "CHECK_CANCELLED_S", 1e-9)
    model.execute([request(-1)])
    module: Any = model._engine.loaded.module
    module.calls.clear()
    responses = model.execute([request(-1, cancelled=True) for _ in range(3)])
    assert [response.error().code() for response in responses] == [TritonError.CANCELLED] * 3
    assert module.calls == []


class Keeper(nn.Module):
    """Records whether the memory of the failed batch was freed before the retry."""

    def __init__(self) -> None:
        super().__init__()
        self.batch: Any = None
        self.freed: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1 and (x == -1).any():
            import weakref

            self.batch = weakref.ref(x)
            raise ValueError("negative")
        if self.batch is not None:
            self.freed.append(self.batch() is None)
        return 2 * x


@pytest.mark.usefixtures("no_collector")
def test_memory_of_a_failed_batch_is_freed_before_retries(tmp_path: Path) -> None:
    """A batch that did not fit in memory is retried in parts, which need that memory."""
    model = _plain(tmp_path, Case(Keeper, _X, _Y))
    module: Any = model._engine.loaded.module
    module.batch = None
    model.execute([request(1), request(-1)])
    assert module.freed
    assert all(module.freed)
