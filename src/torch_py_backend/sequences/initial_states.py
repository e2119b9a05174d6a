"""What the states of a sequence are in its first step: zeros, or what a file holds."""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.artifacts import discovery
from torch_py_backend.batching.gather_scatter import Item, Strings, Value
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.config.sequence_config import Initial, State
from torch_py_backend.errors import ArtifactError

_FOLDER = "initial_state"


def find(config: ModelConfig, rows: int | None) -> Item:
    """What the states are in the first step.

    Args:
        config: the model's config.
        rows: the size of the batch dimension; None: the model has none.

    Raises:
        ArtifactError: a file of initial values is missing, or does not hold them.
        ConfigError: it lies outside the model's folder.
    """
    return {
        state.input: _in_rows(_begin(config, state, state.initial), rows)
        for state in config.states
        if state.initial is not None
    }


def _in_rows(value: Value, rows: int | None) -> Value:
    if rows is None:
        return value
    if isinstance(value, Tensor):
        return value.expand(rows, *value.shape).contiguous()
    return np.repeat(value[None], rows, axis=0)


def _begin(config: ModelConfig, state: State, begins: Initial) -> Value:
    kind = state.dtype.torch if state.dtype is not None else None
    if begins.file is None:
        if kind is None:
            return np.full(begins.dims, b"", dtype=np.object_)
        return torch.zeros(begins.dims, dtype=getattr(torch, kind))
    content = _read(config, state, begins.file)
    if kind is None:
        return _strings(config, state, content)
    dtype: torch.dtype = getattr(torch, kind)
    needed = begins.size * dtype.itemsize
    if len(content) < needed:
        raise _misfit(config, state, f"{len(content)} bytes", f"{needed} bytes")
    if not needed:
        return torch.zeros(begins.dims, dtype=dtype)
    return torch.frombuffer(bytearray(content[:needed]), dtype=dtype).reshape(begins.dims)


def _read(config: ModelConfig, state: State, file: str) -> bytes:
    folder = config.folder / _FOLDER
    discovery.refuse_outside(config, f"the data_file of the state '{state.input}'", file, folder)
    try:
        return (folder / file).read_bytes()
    except OSError as error:
        raise ArtifactError(
            config.name,
            f"the data_file of the state '{state.input}' cannot be read: {error.strerror}",
            expected=f"{_FOLDER}/{file} in the model's folder",
        ) from None


def _strings(config: ModelConfig, state: State, content: bytes) -> Strings:
    """Each string is its length in four bytes, and its text."""
    dims = state.initial.dims if state.initial is not None else ()
    found, place = [], 0
    while place + 4 <= len(content):
        (size,) = struct.unpack_from("<I", content, place)
        place += 4 + size
        found.append(content[place - size : place])
    if place != len(content) or len(found) != math.prod(dims):
        raise _misfit(
            config, state, f"{len(found)} strings", f"{math.prod(dims)}, each behind its length"
        )
    strings: Strings = np.empty(len(found), dtype=np.object_)
    strings[:] = found
    return strings.reshape(dims)


def _misfit(config: ModelConfig, state: State, found: str, expected: str) -> ArtifactError:
    return ArtifactError(
        config.name, f"the data_file of the state '{state.input}' holds {found}", expected=expected
    )
