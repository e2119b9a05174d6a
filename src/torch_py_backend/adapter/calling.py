"""Calls of other models on the server, through Triton's utilities."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from torch import Tensor

from torch_py_backend.adapter import messages
from torch_py_backend.composition import Model, Results, Transport
from torch_py_backend.errors import CallError, a_type, sanitize_line
from torch_py_backend.values import Value, to_column

# Error codes of the called model to pass on to the client; any other becomes INTERNAL.
_PASSED_ON = ("INVALID_ARG", "UNAVAILABLE", "CANCELLED")
_CHOSEN_BY_TRITON = -1


class ModelCaller(Transport):
    """Sends calls of other models to Triton.

    Args:
        own: the calling model's name. A model that calls itself would deadlock.
        trace: returns Triton's trace of the current request; None: it has none.
    """

    def __init__(self, own: str, trace: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self._own = own
        self._trace = trace

    def send(self, called: Model, inputs: Mapping[str, Any]) -> Results:
        request = self._request(called, inputs)
        with _errors(called):
            return _read(called, _in_time(request.exec, called.timeout))

    async def send_async(self, called: Model, inputs: Mapping[str, Any]) -> Results:
        request = self._request(called, inputs)
        with _errors(called):
            response = await asyncio.wait_for(request.async_exec(), called.timeout)
            return _read(called, response)

    def _request(self, called: Model, inputs: Mapping[str, Any]) -> Any:
        if called.name == self._own:
            raise CallError(
                called.name,
                "the model calls itself, which would deadlock",
                expected="another model",
                cure="Call forward(), or serve the part that is called as a model of its own.",
            )
        values = {name: _value(called, name, value) for name, value in inputs.items()}
        tensors = [value for value in values.values() if isinstance(value, Tensor)]
        settings: dict[str, Any] = {}
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            settings["preferred_memory"] = pb_utils.PreferredMemory(
                pb_utils.TRITONSERVER_MEMORY_GPU, device.index
            )
        trace = self._trace()
        if trace is not None:
            settings["trace"] = trace
        return pb_utils.InferenceRequest(
            model_name=called.name,
            model_version=_CHOSEN_BY_TRITON if called.version is None else called.version,
            inputs=[messages.write_tensor(name, value) for name, value in values.items()],
            requested_output_names=[],  # all
            parameters=dict(called.parameters),
            **settings,
        )


def _value(called: Model, name: str, value: Any) -> Value:
    """Convert an input to a value that Triton's utilities accept."""
    if isinstance(value, Tensor):
        # Triton's utilities would send the values without a pending negation.
        return value.detach().resolve_neg().contiguous()
    if isinstance(value, bool | int | float | np.bool_ | np.number):
        return torch.tensor(value)
    array = np.array(value, dtype=np.object_) if isinstance(value, str | bytes | list) else value
    if isinstance(array, np.ndarray):
        if array.dtype.kind not in "OUS":
            return np.ascontiguousarray(array)
        if all(isinstance(text, str | bytes) for text in array.flat):
            return array.astype(np.object_)
    raise CallError(
        called.name,
        f"its input '{name}' was given {a_type(value)}",
        expected="a tensor, an array, a number, or a list of str or bytes",
    )


def _in_time(execute: Callable[[], Any], seconds: float | None) -> Any:
    """Return the response if it arrives in time; Triton's call itself has no timeout."""
    if seconds is None:
        return execute()
    answer: futures.Future[Any] = futures.Future()

    def wait() -> None:
        try:
            answer.set_result(execute())
        except BaseException as error:  # raised again in the waiting thread
            answer.set_exception(error)

    threading.Thread(target=wait, name="calling", daemon=True).start()
    return answer.result(seconds)


@contextlib.contextmanager
def _errors(called: Model) -> Iterator[None]:
    """Raise a CallError for a call in the context that fails or is late."""
    try:
        yield
    except (asyncio.TimeoutError, futures.TimeoutError):
        if called.timeout is None:  # it is not of this call
            raise
        late = f"no answer came within {called.timeout:g} seconds"
        raise CallError(called.name, late, code="UNAVAILABLE") from None
    except pb_utils.TritonModelException as error:
        raise CallError(called.name, sanitize_line(str(error))) from None


def _read(called: Model, response: Any) -> Results:
    if response.has_error():
        error = response.error()
        codes = {getattr(pb_utils.TritonError, name): name for name in _PASSED_ON}
        code = codes.get(error.code(), "INTERNAL")
        raise CallError(called.name, f"it answers: {sanitize_line(error.message())}", code=code)
    return {
        tensor.name(): to_column(messages.read_tensor(tensor))
        for tensor in response.output_tensors()
    }
