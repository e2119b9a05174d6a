"""Calls of other models on the server, through Triton's utilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from torch import Tensor

from torch_py_backend.adapter import messages
from torch_py_backend.composition import Inputs, Model, Results
from torch_py_backend.errors import CallError, a_type, sanitize_line
from torch_py_backend.pipeline.run import CODES, OK
from torch_py_backend.values import Value, to_column


def send(own: str, called: Model, inputs: Inputs) -> Results:
    """Send a call of the model `own` to another one; return the outputs by name."""
    if called.name == own:
        raise CallError(
            own,
            "the model calls itself, which would deadlock",
            cure="Call forward(), or serve the part that is called as a model of its own.",
        )
    values = {name: _value(called, name, value) for name, value in inputs.items()}
    settings: dict[str, Any] = {}
    for value in values.values():
        if isinstance(value, Tensor) and value.is_cuda:
            settings["preferred_memory"] = pb_utils.PreferredMemory(
                pb_utils.TRITONSERVER_MEMORY_GPU, value.device.index
            )
    request = pb_utils.InferenceRequest(
        model_name=called.name,
        model_version=-1 if called.version is None else called.version,
        inputs=[messages.write_tensor(name, value) for name, value in values.items()],
        requested_output_names=[],  # all
        parameters=dict(called.parameters),
        **settings,
    )
    try:
        response = request.exec()
    except pb_utils.TritonModelException as error:
        raise CallError(called.name, sanitize_line(str(error))) from None
    if response.has_error():
        codes = {getattr(pb_utils.TritonError, name): name for name in CODES if name != OK}
        code = codes.get(response.error().code(), "INTERNAL")
        said = sanitize_line(response.error().message())
        raise CallError(called.name, f"it answers: {said}", code=code)
    outputs = response.output_tensors()
    return {tensor.name(): to_column(messages.read_tensor(tensor)) for tensor in outputs}


def _value(called: Model, name: str, value: Any) -> Value:
    """Convert an input to a value that Triton's utilities accept."""
    if isinstance(value, Tensor):
        # Triton's utilities would send the values without a pending negation.
        return value.detach().resolve_neg().contiguous()
    if isinstance(value, int | float | np.bool_ | np.number):
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
