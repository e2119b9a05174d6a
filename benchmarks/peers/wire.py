"""What the peers share: their arguments, and requests as plain bytes where HTTP carries them.

A body is the bytes of the inputs, one after another, without the batch dimension; an answer is the
bytes of the output. Nothing is cheaper to read than that: a peer is not slow for its parsing.
"""

from __future__ import annotations

import argparse
import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.models import MODELS, Model

# How long a server waits for a batch to fill, where it forms none without waiting.
MAX_DELAY_SECONDS = 0.001
NUMPY_TYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype(np.float32), "INT64": np.dtype(np.int64)}


@dataclass(frozen=True)
class Arguments:
    """How every peer is called."""

    model: str
    port: int


def arguments() -> Arguments:
    """What the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, choices=MODELS)
    parser.add_argument("--port", required=True, type=int)
    parsed = parser.parse_args()
    return Arguments(parsed.model, parsed.port)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listened on a moment ago, for what else a peer serves."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def body(model: Model) -> bytes:
    """The example as a request."""
    return b"".join(tensor.numpy().tobytes() for tensor in model.example())


def answer(model: Model, content: bytes) -> npt.NDArray[Any]:
    """A response as an array."""
    return np.frombuffer(content, NUMPY_TYPES[model.output.dtype]).reshape(model.output.dims)


class Forward:
    """A model that answers bodies in batches."""

    def __init__(self, name: str) -> None:
        self._model = MODELS[name]
        self._module = self._model.build()

    def __call__(self, bodies: Sequence[bytes]) -> list[bytes]:
        """One answer for each body, by one call of the model."""
        with torch.inference_mode():
            rows: Tensor = self._module(*self._columns(bodies))
        return [row.tobytes() for row in rows.numpy()]

    def _columns(self, bodies: Sequence[bytes]) -> list[Tensor]:
        table = np.frombuffer(bytearray().join(bodies), np.uint8).reshape(len(bodies), -1)
        columns, start = [], 0
        for spec in self._model.inputs:
            dtype = NUMPY_TYPES[spec.dtype]
            end = start + dtype.itemsize * math.prod(spec.dims)
            column = np.ascontiguousarray(table[:, start:end]).view(dtype)
            columns.append(torch.from_numpy(column.reshape(len(bodies), *spec.dims)))
            start = end
        return columns
