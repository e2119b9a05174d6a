"""The initial states of a sequence: zeros, or the contents of a file."""

from __future__ import annotations

import math

import numpy as np
import torch

from torch_py_backend import values
from torch_py_backend.config.model_config import ModelConfig, State
from torch_py_backend.errors import ArtifactError, summarize
from torch_py_backend.loading import discovery
from torch_py_backend.values import Item, Value


def find(config: ModelConfig, rows: int | None) -> Item:
    """Return the states for the first step, with a batch dimension of `rows`, or none."""
    states: Item = {}
    for state in config.states:
        value = _one_row(config, state)
        states[state.input] = value if rows is None else value[None][[0] * rows]
    return states


def _one_row(config: ModelConfig, state: State) -> Value:
    dtype: torch.dtype | None = getattr(torch, state.dtype.torch or "", None)
    if state.file is None:
        if dtype is None:
            return np.full(state.initial, b"", dtype=np.object_)
        return torch.zeros(state.initial, dtype=dtype)
    folder = config.folder / "initial_state"
    role = f"the data_file of the state '{state.input}'"
    path = discovery.inside(config, role, folder, state.file)
    count = math.prod(state.initial)
    try:
        content = path.read_bytes()
        if dtype is not None:
            numbers = torch.frombuffer(bytearray(content), dtype=dtype, count=count)
            return numbers.reshape(state.initial)
        texts = []  # each follows its length in four bytes
        while len(content) >= (end := 4 + int.from_bytes(content[:4], "little")):
            texts.append(content[4:end])
            content = content[end:]
        return values.objects(texts[:count]).reshape(state.initial)
    except (OSError, ValueError) as error:  # the file is missing, or too short
        raise ArtifactError(f"{role} cannot be read: {summarize(error)}") from None
