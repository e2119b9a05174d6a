"""Calls of other models: values, errors, and calls without a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build
import fake_triton
import numpy as np
import pytest
import scenarios
import torch
from fake_triton import InferenceRequest, InferenceResponse, TritonError
from instances import logged, request

from torch_py_backend import composition
from torch_py_backend.adapter import TritonPythonModel, calling
from torch_py_backend.composition import Model, model, stand_in
from torch_py_backend.errors import CallError

Answer = Callable[[InferenceRequest], InferenceResponse]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """The other models of a server, as functions of requests."""
    functions: dict[str, Answer] = {}
    monkeypatch.setattr(InferenceRequest, "served", functions)
    monkeypatch.setattr(composition, "_transport", calling.ModelCaller("caller"))
    return functions


def echo(request: InferenceRequest) -> InferenceResponse:
    return InferenceResponse(request.inputs())


def failing(message: str, code: int) -> Answer:
    return lambda _: InferenceResponse(error=TritonError(message, code))


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (torch.arange(6.0).reshape(2, 3).T, torch.arange(6.0).reshape(2, 3).T),
        (torch.ones(2, requires_grad=True), torch.ones(2)),
        (torch.tensor([1j]).conj().imag, torch.tensor([-1.0])),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
        (torch.ones(0, 2), torch.ones(0, 2)),
        (np.arange(4)[::2], torch.tensor([0, 2])),
        (0.5, torch.tensor(0.5)),
        (np.float32(0.5), torch.tensor(0.5)),
        (True, torch.tensor(True)),
    ],
)
def test_numbers(sent: Any, expected: torch.Tensor, served: dict[str, Answer]) -> None:
    """Tensors, arrays and numbers keep their values and types, and return as tensors."""
    served["other"] = echo
    outputs = model("other")(x=sent)
    assert list(outputs) == ["x"]
    assert torch.equal(outputs["x"], expected)
    assert outputs["x"].dtype == expected.dtype


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (["a", "é"], [b"a", "é".encode()]),
        ([["a"], [b"\xff"]], [[b"a"], [b"\xff"]]),
        (np.array([b"a", "b"], dtype=object), [b"a", b"b"]),
        ("a", b"a"),
    ],
)
def test_strings(sent: Any, expected: Any, served: dict[str, Answer]) -> None:
    """Strings and bytes of any shape return as arrays of bytes."""
    served["other"] = echo
    assert model("other")(x=sent)["x"].tolist() == expected


@pytest.mark.parametrize("sent", [None, [1, 2], [["a"], ["b", "c"]]])
def test_invalid_values(sent: Any, served: dict[str, Answer]) -> None:
    """A value that cannot be sent raises an error with the input and the type."""
    served["other"] = echo
    with pytest.raises(CallError) as error:
        model("other")(x=sent)
    assert f"its input 'x' was given a {type(sent).__name__}" in str(error.value)


def test_version_and_parameters(served: dict[str, Answer]) -> None:
    """Version and parameters are sent with the request; inputs may have any name."""
    requests: list[InferenceRequest] = []

    def record(request: InferenceRequest) -> InferenceResponse:
        requests.append(request)
        return echo(request)

    served["other"] = record
    called = Model("other", version=3, parameters={"top": 2})
    called(**{"self": torch.ones(1), "ARGS[0]": torch.ones(1)})
    model("other")()
    assert [request.model_version for request in requests] == [3, -1]
    assert [request.parameters() for request in requests] == ['{"top": 2}', "{}"]
    assert [tensor.name() for tensor in requests[0].inputs()] == ["self", "ARGS[0]"]


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (TritonError.INVALID_ARG, "INVALID_ARG"),
        (TritonError.NOT_FOUND, "INTERNAL"),
    ],
)
def test_errors_of_the_model(code: int, expected: str, served: dict[str, Answer]) -> None:
    """An error of the other model is raised, in one line and without paths of the server."""
    served["other"] = failing("bad input in /srv/models/other/1/model.py\nTraceback", code)
    with pytest.raises(CallError) as error:
        model("other")(x=torch.ones(1))
    assert str(error.value) == "model 'other': it answers: bad input in model.py."
    assert error.value.code == expected


def test_triton_raises(served: dict[str, Answer]) -> None:
    """Errors of Triton itself, as for a decoupled or an unknown model, become CallErrors."""
    with pytest.raises(CallError, match="model 'absent': it answers: Failed for execute"):
        model("absent")(x=torch.ones(1))

    def raises(_: InferenceRequest) -> InferenceResponse:
        raise fake_triton.TritonModelException("is a decoupled model")

    served["other"] = raises
    with pytest.raises(CallError, match="is a decoupled model"):
        model("other")()
    with pytest.raises(CallError, match="is a decoupled model"):
        asyncio.run(model("other").asynchronously())


def test_a_timeout_of_another(served: dict[str, Answer]) -> None:
    """A TimeoutError in a call without a time limit is raised as it is."""

    def raises(_: InferenceRequest) -> InferenceResponse:
        raise TimeoutError("of a socket")

    served["other"] = raises
    with pytest.raises(TimeoutError, match="of a socket"):
        model("other")()


def test_a_model_calls_itself(served: dict[str, Answer]) -> None:
    """A model that calls itself fails at once: it would wait for itself."""
    served["caller"] = echo
    with pytest.raises(CallError, match="the model calls itself, which would deadlock"):
        model("caller")(x=torch.ones(1))


def test_timeout(served: dict[str, Answer]) -> None:
    """A call that exceeds its timeout raises an error."""
    late = threading.Event()

    def waits(sent: InferenceRequest) -> InferenceResponse:
        late.wait(60)
        return echo(sent)

    served["late"], served["prompt"] = waits, echo
    try:
        with pytest.raises(CallError, match=r"no answer came within 0\.05 seconds") as error:
            model("late", timeout=0.05)(x=torch.ones(1))
        assert error.value.code == "UNAVAILABLE"
        with pytest.raises(CallError, match="no answer came"):
            asyncio.run(_shut_late(late))
    finally:
        late.set()
    assert model("prompt", timeout=60)(x=torch.ones(1))["x"].tolist() == [1]
    served["prompt"] = failing("no", TritonError.INVALID_ARG)
    with pytest.raises(CallError, match="it answers: no"):
        model("prompt", timeout=60)()


async def _shut_late(late: threading.Event) -> None:
    try:
        await model("late", timeout=0.05).asynchronously(x=torch.ones(1))
    finally:
        late.set()


def test_asynchronous_calls(served: dict[str, Answer]) -> None:
    """Asynchronous calls run at the same time."""
    both = threading.Barrier(2, timeout=60)

    def meets(sent: InferenceRequest) -> InferenceResponse:
        both.wait()
        return echo(sent)

    served["other"] = meets

    async def run() -> Any:
        calls = [model("other").asynchronously(x=torch.tensor([value])) for value in (1, 2)]
        return await asyncio.gather(*calls)

    assert [outputs["x"].tolist() for outputs in asyncio.run(run())] == [[1], [2]]


# --- without a server ------------------------------------------------------------------------


def test_without_server() -> None:
    """Outside a server, a call raises an error that names `stand_in`."""
    with pytest.raises(CallError) as error:
        model("other")(x=1, y=2)
    assert "it was called with x, y where no server executes requests" in str(error.value)
    assert "torch_py_backend.composition.stand_in" in str(error.value)
    with pytest.raises(CallError):
        asyncio.run(model("other").asynchronously())


def test_stand_in() -> None:
    """Functions replace models until the end of the block."""
    with stand_in({"other": lambda x: {"y": x + 1}}):
        assert model("other")(x=1) == {"y": 2}
        assert asyncio.run(model("other").asynchronously(x=2)) == {"y": 3}
        with pytest.raises(CallError):
            model("absent")(x=1)
    with pytest.raises(CallError):
        model("other")(x=1)


_HEAD = """\
from torch import Tensor, nn
from torch_py_backend.composition import model


"""
_IN_FORWARD = """\
class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = model("other")(x=x)["x"]
        if bool((x < 0).any()):
            raise ValueError("a bad value")
        return y
"""
_IN_PREPROCESS = """\
class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ValueError("a bad value")
        return x


class Hooks:
    def preprocess(self, x: Tensor) -> Tensor:
        return model("other")(x=x.unsqueeze(0))["x"][0]
"""


@pytest.fixture
def start(
    tmp_path: Path, process: None, served: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., TritonPythonModel]:
    """A function that starts a model in a server."""
    monkeypatch.setattr(composition, "_transport", composition.Transport())

    def start(code: str, **options: dict[str, str]) -> TritonPythonModel:
        (tmp_path / "1").mkdir()
        scenarios.hooked(_HEAD + code)(tmp_path / "1")
        arguments = build.arguments(parameters=options)
        started = TritonPythonModel()
        started.initialize(arguments | {"model_repository": str(tmp_path)})
        return started

    return start


def test_in_a_server(start: Callable[..., TritonPythonModel], served: dict[str, Answer]) -> None:
    """A served model calls others once it is loaded; their error codes are passed on."""
    served["other"] = echo
    model = start(_IN_FORWARD)
    assert "the warm-up is skipped" in "".join(logged("warn"))
    (response,) = model.execute([request(1)])
    assert response.error() is None
    assert response.output_tensors()[0].as_numpy().tolist() == [[1, 1, 1, 1]]
    served["other"] = failing("no such digit", TritonError.INVALID_ARG)
    (response,) = model.execute([request(1)])
    assert response.error().code() == TritonError.INVALID_ARG
    assert response.error().message() == "model 'other': it answers: no such digit."


@pytest.mark.parametrize("code", [_IN_FORWARD, _IN_PREPROCESS], ids=["in forward", "in preprocess"])
@pytest.mark.parametrize("retried", ["", "true"], ids=["default", "retried"])
def test_batches_that_called_other_models(
    code: str, retried: str, start: Callable[..., TritonPythonModel], served: dict[str, Answer]
) -> None:
    """forward() is not called again: the other model would get its rows twice."""
    rows: list[int] = []

    def counted(sent: InferenceRequest) -> InferenceResponse:
        rows.append(len(sent.inputs()[0].as_numpy()))
        return echo(sent)

    served["other"] = counted
    options = {"RETRY_FAILED_BATCH": {"string_value": retried}} if retried else {}
    responses = start(code, **options).execute([request(value) for value in (1, -1, 3, 4)])
    failed = [response.error() is not None for response in responses]
    isolated = retried or code is _IN_PREPROCESS  # which is not called again
    assert failed == ([False, True, False, False] if isolated else [True] * 4)
    assert (sum(rows) == 4) is not (bool(retried) and code is _IN_FORWARD)
