"""The initial states of a sequence: zeros, or the contents of a file."""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.config.sequence_config import State
from torch_py_backend.errors import ArtifactError, counted
from torch_py_backend.loading import discovery
from torch_py_backend.values import Item, Strings, Value

_FOLDER = "initial_state"


def find(config: ModelConfig, rows: int | None) -> Item:
    """Return the states for the first step.

    Args:
        config: the model's config.
        rows: the size of the batch dimension; None: the model has none.

    Raises:
        ArtifactError: a file of initial values is missing or too short, or has other strings.
        ConfigError: the file is outside the model's folder.
    """
    states: Item = {}
    for state in config.states:
        value = _one_row(config, state)
        if rows is None:
            states[state.input] = value
        elif isinstance(value, Tensor):
            states[state.input] = value.expand(rows, *value.shape).contiguous()
        else:
            states[state.input] = np.repeat(value[None], rows, axis=0)
    return states


def _one_row(config: ModelConfig, state: State) -> Value:
    name = state.dtype.torch
    if state.file is None:
        if name is None:
            return np.full(state.initial, b"", dtype=np.object_)
        return torch.zeros(state.initial, dtype=getattr(torch, name))
    folder = config.folder / _FOLDER
    role = f"the data_file of the state '{state.input}'"
    discovery.check_inside(config, role, state.file, folder)
    try:
        content = (folder / state.file).read_bytes()
    except OSError as error:
        raise ArtifactError(
            f"{role} cannot be read: {error.strerror}",
            expected=f"{_FOLDER}/{state.file} in the model's folder",
        ) from None
    if name is None:
        return _parse_strings(state, content)
    dtype: torch.dtype = getattr(torch, name)
    needed = math.prod(state.initial) * dtype.itemsize
    if len(content) < needed:
        raise _misfit(state, counted(len(content), "byte"), counted(needed, "byte"))
    if not needed:  # torch.frombuffer refuses empty buffers
        return torch.zeros(state.initial, dtype=dtype)
    return torch.frombuffer(bytearray(content[:needed]), dtype=dtype).reshape(state.initial)


def _parse_strings(state: State, content: bytes) -> Strings:
    """Parse strings, each with its length in four bytes before its text."""
    texts, position, count = [], 0, math.prod(state.initial)
    while position + 4 <= len(content):
        (size,) = struct.unpack_from("<I", content, position)
        position += 4 + size
        texts.append(content[position - size : position])
    if position != len(content) or len(texts) != count:
        expected = f"{count}, each behind its length"
        raise _misfit(state, f"{len(texts)} strings", expected)
    strings: Strings = np.empty(len(texts), dtype=np.object_)
    strings[:] = texts
    return strings.reshape(state.initial)


def _misfit(state: State, found: str, expected: str) -> ArtifactError:
    return ArtifactError(
        f"the data_file of the state '{state.input}' holds {found}", expected=expected
    )
