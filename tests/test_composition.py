"""Calls of other models: values, errors, and calls without a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import fake_triton
import numpy as np
import pytest
import torch
from engines import BAD, bad, check, engine, items
from fake_triton import InferenceRequest, InferenceResponse, TritonError
from torch import Tensor

from torch_py_backend import composition
from torch_py_backend.adapter import calling, messages
from torch_py_backend.composition import Model, model, stand_in
from torch_py_backend.engine import warmup
from torch_py_backend.errors import CallError, ForwardError

Answer = Callable[[InferenceRequest], InferenceResponse]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """The other models of a server, as functions of requests."""
    functions: dict[str, Answer] = {}
    monkeypatch.setattr(InferenceRequest, "served", functions)
    monkeypatch.setattr(composition, "send", partial(calling.send, "caller"))
    return functions


def echo(request: InferenceRequest) -> InferenceResponse:
    return InferenceResponse(request.inputs())


def failing(message: str, code: int) -> Answer:
    return lambda _: InferenceResponse(error=TritonError(message, code))


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
        (True, torch.tensor(True)),
        ("a", np.array(b"a", dtype=object)),
        ([["a"], [b"\xff"]], np.array([[b"a"], [b"\xff"]], dtype=object)),
        (np.array([b"a", "b"], dtype=object), np.array([b"a", b"b"], dtype=object)),
    ],
)
def test_numbers_return_as_tensors_and_strings_as_arrays_of_bytes(
    sent: Any, expected: Any, served: dict[str, Answer]
) -> None:
    served["other"] = echo
    outputs = model("other")(x=sent)
    assert list(outputs) == ["x"]
    assert outputs["x"].dtype == expected.dtype
    assert outputs["x"].tolist() == expected.tolist()


@pytest.mark.parametrize("sent", [None, [1, 2], [["a"], ["b", "c"]]])
def test_a_value_that_cannot_be_sent_is_named(sent: Any, served: dict[str, Answer]) -> None:
    served["other"] = echo
    with pytest.raises(CallError, match=f"input 'x' was given a {type(sent).__name__}"):
        model("other")(x=sent)


def test_version_parameters_and_inputs_of_any_name_are_sent(served: dict[str, Answer]) -> None:
    other = mock.Mock(side_effect=echo)
    served["other"] = other
    called = Model("other", version=3, parameters={"top": 2})
    assert [*called(**{"self": torch.ones(1), "ARGS[0]": torch.ones(1)})] == ["self", "ARGS[0]"]
    model("other")()
    requests = [call.args[0] for call in other.call_args_list]
    assert [request.model_version for request in requests] == [3, -1]
    assert [request.parameters() for request in requests] == ['{"top": 2}', "{}"]


_DECOUPLED = mock.Mock(side_effect=fake_triton.TritonModelException("is a decoupled model"))
_TEXT = "bad input in /srv/models/other/1/model.py\nTraceback"


@pytest.mark.parametrize(
    ("name", "answer", "code", "says"),
    [
        ("other", failing(_TEXT, TritonError.INVALID_ARG), "INVALID_ARG", "bad input in model.py."),
        ("other", failing(_TEXT, TritonError.NOT_FOUND), "INTERNAL", "bad input in model.py."),
        ("other", _DECOUPLED, "INTERNAL", "is a decoupled model."),
        ("absent", echo, "INTERNAL", "it answers: Failed for execute"),
        ("caller", echo, "INTERNAL", "the model calls itself, which would deadlock"),
    ],
)
def test_an_error_of_the_call_is_raised_without_paths(
    name: str, answer: Answer, code: str, says: str, served: dict[str, Answer]
) -> None:
    served |= {"other": answer, "caller": echo}
    with pytest.raises(CallError, match=f"model '{name}': .*{says}") as error:
        model(name)(x=torch.ones(1))
    assert error.value.code == code
    assert "/srv" not in str(error.value)
    assert "Traceback" not in str(error.value)


def test_asynchronous_calls_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=60)

    async def run() -> Any:
        return await asyncio.gather(*(asyncio.to_thread(model("other"), x=x) for x in (1, 2)))

    with stand_in({"other": lambda x: {"x": x, "place": both.wait()}}):
        assert [outputs["x"] for outputs in asyncio.run(run())] == [1, 2]


def test_functions_stand_in_for_models_until_the_end_of_the_block() -> None:
    with stand_in({"other": lambda x: {"y": x + 1}}):
        assert model("other")(x=1) == {"y": 2}
        with pytest.raises(CallError):
            model("absent")(x=1)
    without = r"called with x, y where no server .* torch_py_backend\.composition\.stand_in"
    with pytest.raises(CallError, match=without):
        model("other")(x=1, y=2)


@pytest.mark.parametrize(
    ("retries", "failed", "calls"), [(None, [0, 1, 2, 3], [4]), (True, [1], [4, 2, 2, 1, 1])]
)
def test_forward_that_called_other_models_is_not_called_again_by_default(
    retries: bool | None, failed: list[int], calls: list[int]
) -> None:
    # The other model would get its rows twice.
    rows: list[int] = []

    def double(x: Tensor) -> dict[str, Tensor]:
        rows.append(len(x))
        return {"y": 2 * x}

    def forward(x: Tensor) -> Tensor:
        y: Tensor = model("other")(x=x)["y"]
        bad(x)
        return y

    sent = items([1.0, BAD, 3.0, 4.0])
    with stand_in({"other": double}):
        outcomes = engine(forward, retry_failed_batch=retries).run(sent)
    assert check(sent, outcomes, ForwardError) == failed
    assert rows == calls


def test_a_model_loads_without_others_and_passes_on_their_error_codes(
    served: dict[str, Answer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caller = engine(lambda x: model("other")(x=x)["x"])
    with monkeypatch.context() as loading:
        loading.setattr(composition, "send", composition._refuse)
        warmup.run(caller, serving=True)
    assert "the warm-up is skipped" in caplog.text
    served["other"] = failing("no such digit", TritonError.INVALID_ARG)
    error = messages.write(caller.run(items([1.0]))[0], "caller").error()
    assert error.code() == TritonError.INVALID_ARG
    assert error.message() == "model 'other': it answers: no such digit."
