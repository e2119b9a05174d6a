"""Configs of models whose sequences keep states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import build

from torch_py_backend.config import dtypes
from torch_py_backend.config.model_config import ModelConfig, Origin, TensorSpec
from torch_py_backend.config.sequence_config import (
    ControlInput,
    InitialState,
    SequenceConfig,
    State,
)

IDLE_S = 5.0
SLOTS = 16


def make_state(
    names: tuple[str, str] = ("total", "sum"),
    dtype: str = "FP32",
    dims: tuple[int, ...] = (4,),
    initial: InitialState | None = None,
) -> State:
    begins = initial or InitialState(tuple(max(1, size) for size in dims))
    return State(*names, dtypes.from_triton(dtype), dims, begins)


def config(*states: State, controls: Sequence[ControlInput] = (), **overrides: Any) -> ModelConfig:
    """A model whose sequences keep these states."""
    sequencing = SequenceConfig(SLOTS, IDLE_S, 0.0, tuple(controls), states)
    plain = build.config(sequencing=sequencing, **overrides)
    typed = [state for state in states if state.dtype is not None]
    inputs = (TensorSpec(s.input, s.dtype, s.dims, origin=Origin.STATE) for s in typed if s.dtype)
    names = {spec.name for spec in plain.outputs}
    outputs = (
        TensorSpec(s.output, s.dtype, s.dims, origin=Origin.STATE)
        for s in typed
        if s.dtype and s.output not in names
    )
    return dataclasses.replace(
        plain, inputs=(*plain.inputs, *inputs), outputs=(*plain.outputs, *outputs)
    )
