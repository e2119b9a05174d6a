"""A running server with every scenario's model, and its clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kinds
import ml_dtypes
import pytest
import scenarios
import torch
import tritonclient.grpc
import tritonclient.http
from scenarios import Call, Refused, assert_close
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from torch_py_backend.server import ModelState, Server

# What one server serves together: all at once would not fit a small machine's memory.
TABLES = {
    "scenarios": tuple(one for one in scenarios.TABLE if not one.load_error),
    "refused": tuple(one for one in scenarios.TABLE if one.load_error),
    "kinds": kinds.TABLE,
    "function": tuple(one for one in scenarios.TABLE if one.name == "function"),
}


@dataclass(frozen=True)
class Serving:
    """A running server with every scenario's model, and its clients."""

    server: Server
    states: dict[str, ModelState]
    http: tritonclient.http.InferenceServerClient
    grpc: tritonclient.grpc.InferenceServerClient
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def check(self, protocol: str, name: str, call: Call) -> None:
        """One request has the answer, or the refusal, that the table has."""
        if isinstance(call.expected, Refused):
            with pytest.raises(InferenceServerException) as refusal:
                self.infer(protocol, name, call.inputs, [])
            message = refusal.value.message()
            assert all(part in message for part in call.expected.says), message
            assert not any(part in message for part in call.expected.hides), message
            assert str(call.expected.status) in refusal.value.status() or protocol == "grpc"
            return
        result = self.infer(protocol, name, call.inputs, list(call.expected))
        for output, expected in call.expected.items():
            came, wanted = result.as_numpy(output), to_numpy(expected)
            assert came.dtype == wanted.dtype
            assert came.shape == wanted.shape
            assert_close(came, wanted)

    def infer(self, protocol: str, name: str, inputs: dict[str, Any], outputs: list[str]) -> Any:
        """One request over `http` or `grpc`; torch tensors are sent as BF16."""
        module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
        sent = []
        for key, value in inputs.items():
            array = to_numpy(value)
            tensor = module.InferInput(key, list(array.shape), np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array)
            sent.append(tensor)
        wanted = [module.InferRequestedOutput(one) for one in outputs]
        return getattr(self, protocol).infer(name, sent, outputs=wanted)


def to_numpy(value: Any) -> Any:
    """Torch tensors stand for BF16, which clients hold in the type of ml_dtypes."""
    if isinstance(value, torch.Tensor):
        return value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return value
