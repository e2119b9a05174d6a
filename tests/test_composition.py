"""Calls of other models: what is sent, what comes back, and what is said where nothing does."""

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
import torch
from fake_triton import InferenceRequest, InferenceResponse, TritonError

from torch_py_backend import composition
from torch_py_backend.adapter import TritonPythonModel, calling
from torch_py_backend.composition import Model, model, stand_in
from torch_py_backend.errors import CallError, NoServerError
from torch_py_backend.tools import inspection

Answer = Callable[[InferenceRequest], InferenceResponse]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """The other models of a server, as functions of requests; calls go there."""
    functions: dict[str, Answer] = {}
    monkeypatch.setattr(InferenceRequest, "served", functions)
    monkeypatch.setattr(composition, "_transport", calling.ModelCaller("caller"))
    return functions


def echo(request: InferenceRequest) -> InferenceResponse:
    return InferenceResponse(request.inputs())


def refuses(message: str, code: int) -> Answer:
    return lambda _: InferenceResponse(error=TritonError(message, code))


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (torch.ones(2, 3), torch.ones(2, 3)),
        (torch.arange(6.0).reshape(2, 3).T, torch.arange(6.0).reshape(2, 3).T),
        (torch.ones(2, requires_grad=True), torch.ones(2)),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
        (torch.ones(3000), torch.ones(3000)),
        (torch.ones(0, 2), torch.ones(0, 2)),
        (np.arange(4)[::2], torch.tensor([0, 2])),
        (3, torch.tensor(3)),
        (0.5, torch.tensor(0.5)),
        (True, torch.tensor(True)),
    ],
)
def test_numbers(sent: Any, expected: torch.Tensor, served: dict[str, Answer]) -> None:
    """Tensors, arrays and numbers are sent as they are, and come back as tensors."""
    served["other"] = echo
    found = model("other")(x=sent)
    assert list(found) == ["x"]
    assert torch.equal(found["x"], expected)
    assert found["x"].dtype == expected.dtype


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (["a", "é"], [b"a", "é".encode()]),
        ([["a"], [b"\xff"]], [[b"a"], [b"\xff"]]),
        (np.array(["a"]), [b"a"]),
        (np.array([b"a", "b"], dtype=object), [b"a", b"b"]),
        ("a", b"a"),
    ],
)
def test_strings(sent: Any, expected: Any, served: dict[str, Answer]) -> None:
    """Texts and bytes of any shape come back as arrays of bytes."""
    served["other"] = echo
    assert model("other")(x=sent)["x"].tolist() == expected


@pytest.mark.parametrize("sent", [None, {"a": 1}, [1, 2], [["a"], ["b", "c"]], object()])
def test_refused_values(sent: Any, served: dict[str, Answer]) -> None:
    """What cannot be sent is named with the input."""
    served["other"] = echo
    with pytest.raises(CallError) as refusal:
        model("other")(x=sent)
    assert f"its input 'x' was given a {type(sent).__name__}" in str(refusal.value)


def test_what_goes_with_it(served: dict[str, Answer]) -> None:
    """Version and parameters are passed; an input may have any name."""
    seen: list[InferenceRequest] = []

    def note(request: InferenceRequest) -> InferenceResponse:
        seen.append(request)
        return echo(request)

    served["other"] = note
    called = Model("other", version=3, parameters={"top": 2})
    called(**{"self": torch.ones(1), "ARGS[0]": torch.ones(1)})
    model("other")()
    assert [one.model_version for one in seen] == [3, -1]
    assert [one.parameters() for one in seen] == ['{"top": 2}', "{}"]
    assert [one.name() for one in seen[0].inputs()] == ["self", "ARGS[0]"]


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (TritonError.INVALID_ARG, "INVALID_ARG"),
        (TritonError.UNAVAILABLE, "UNAVAILABLE"),
        (TritonError.CANCELLED, "CANCELLED"),
        (TritonError.NOT_FOUND, "INTERNAL"),
        (TritonError.INTERNAL, "INTERNAL"),
    ],
)
def test_refusals(code: int, expected: str, served: dict[str, Answer]) -> None:
    """An error of the other model is raised, in one line without the server's folders."""
    served["other"] = refuses("bad input in /srv/models/other/1/model.py\nTraceback", code)
    with pytest.raises(CallError) as refusal:
        model("other")(x=torch.ones(1))
    assert str(refusal.value) == "model 'other': it answers: bad input in model.py."
    assert refusal.value.code == expected


def test_unknown_model(served: dict[str, Answer]) -> None:
    """A model that is not there is told by its name."""
    with pytest.raises(CallError, match="model 'absent': it answers: Failed for execute"):
        model("absent")(x=torch.ones(1))


def test_triton_raises(served: dict[str, Answer]) -> None:
    """What Triton's utilities raise themselves, for a decoupled model say, is a CallError."""

    def raises(_: InferenceRequest) -> InferenceResponse:
        raise fake_triton.TritonModelException("is a decoupled model")

    served["other"] = raises
    with pytest.raises(CallError, match="is a decoupled model"):
        model("other")()
    with pytest.raises(CallError, match="is a decoupled model"):
        asyncio.run(model("other").asynchronously())


def test_itself(served: dict[str, Answer]) -> None:
    """A model that would wait for itself is told so at once."""
    served["caller"] = echo
    with pytest.raises(CallError, match="the model calls itself, which would deadlock"):
        model("caller")(x=torch.ones(1))


def test_timeout(served: dict[str, Answer]) -> None:
    """An answer that does not come in time is an error; one that does is none."""
    late = threading.Event()

    def waits(request: InferenceRequest) -> InferenceResponse:
        late.wait(60)
        return echo(request)

    served["late"], served["prompt"] = waits, echo
    try:
        with pytest.raises(CallError, match=r"no answer came within 0\.05 seconds") as refusal:
            model("late", timeout=0.05)(x=torch.ones(1))
        assert refusal.value.code == "UNAVAILABLE"
        with pytest.raises(CallError, match="no answer came"):
            asyncio.run(_shut_late(late))
    finally:
        late.set()
    assert model("prompt", timeout=60)(x=torch.ones(1))["x"].tolist() == [1]
    served["prompt"] = refuses("no", TritonError.INVALID_ARG)
    with pytest.raises(CallError, match="it answers: no"):
        model("prompt", timeout=60)()


async def _shut_late(late: threading.Event) -> None:
    try:
        await model("late", timeout=0.05).asynchronously(x=torch.ones(1))
    finally:
        late.set()


def test_together(served: dict[str, Answer]) -> None:
    """Asynchronous calls are under way at the same time."""
    both = threading.Barrier(2, timeout=60)

    def meets(request: InferenceRequest) -> InferenceResponse:
        both.wait()
        return echo(request)

    served["other"] = meets

    async def ask() -> Any:
        calls = [model("other").asynchronously(x=torch.tensor([one])) for one in (1, 2)]
        return await asyncio.gather(*calls)

    assert [found["x"].tolist() for found in asyncio.run(ask())] == [[1], [2]]


# --- without a server ------------------------------------------------------------------------


def test_nowhere() -> None:
    """Outside a server a call says so, and what helps."""
    with pytest.raises(NoServerError) as refusal:
        model("other")(x=1, y=2)
    assert "it was called with x, y where no server executes requests" in str(refusal.value)
    assert "torch_py_backend.composition.stand_in" in str(refusal.value)
    with pytest.raises(NoServerError):
        asyncio.run(model("other").asynchronously())


def test_stand_in() -> None:
    """Functions answer in the place of models, until the end of the block."""
    with stand_in({"other": lambda x: {"y": x + 1}}):
        assert model("other")(x=1) == {"y": 2}
        assert asyncio.run(model("other").asynchronously(x=2)) == {"y": 3}
        with pytest.raises(NoServerError):
            model("absent")(x=1)
    with pytest.raises(NoServerError):
        model("other")(x=1)


_CALLER = """\
from torch import Tensor, nn

from torch_py_backend.composition import model


class Caller(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return model("other")(x=x)["x"] + 1
"""


def test_check_leaves_the_warm_up_out(tmp_path: Path, process: None) -> None:
    """A model that calls others is loaded and bound by `check`, and not called."""
    build.write(tmp_path, "model.py", _CALLER)
    report = inspection.inspect(build.arguments() | {"model_repository": str(tmp_path)})
    (warning,) = report["warnings"]
    assert "the warm-up is left out, for the model calls another. model 'other'" in warning


def test_in_a_server(
    tmp_path: Path, process: None, served: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is served calls others, but not while it loads; their errors have codes."""
    monkeypatch.setattr(composition, "_transport", composition._Nowhere())
    build.write(tmp_path, "model.py", _CALLER)
    served["other"] = echo
    made = TritonPythonModel()
    made.initialize(build.arguments() | {"model_repository": str(tmp_path)})
    assert "the warm-up is left out" in "".join(text for _, text in fake_triton.Logger.lines)
    document = {"input": [{"name": "x", "dims": [4]}]}
    sent = fake_triton.request({"x": np.ones((1, 4), dtype=np.float32)}, document)
    (response,) = made.execute([sent])
    assert response.error() is None
    assert response.output_tensors()[0].as_numpy().tolist() == [[2, 2, 2, 2]]
    served["other"] = refuses("no such digit", TritonError.INVALID_ARG)
    (response,) = made.execute([sent])
    assert response.error().code() == TritonError.INVALID_ARG
    assert response.error().message() == "model 'other': it answers: no such digit."
