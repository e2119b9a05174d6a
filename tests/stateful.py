"""Models whose sequences keep states: their configs, and engines with a clock of the test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import build
import numpy as np
import torch
from torch import nn

from torch_py_backend.config import dtypes
from torch_py_backend.config.model_config import (
    ModelConfig,
    Origin,
    SequenceConfig,
    State,
    TensorSpec,
)
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.pipeline.sequences import Sequences
from torch_py_backend.signature import binding, introspection
from torch_py_backend.values import Outcome, RequestItem, Step

IDLE_S = 5.0


def make_state(
    names: tuple[str, str] = ("total", "sum"),
    dtype: str = "FP32",
    dims: tuple[int, ...] = (4,),
    file: str | None = None,
) -> State:
    begins = tuple(max(1, size) for size in dims)
    return State(*names, dtypes.from_triton(dtype), dims, begins, file)


def config(*states: State, most: int = 8, **overrides: Any) -> ModelConfig:
    sequencing = SequenceConfig(IDLE_S, (), states, True, most)
    plain = build.config(sequencing=sequencing, **overrides)
    inputs = (TensorSpec(s.input, s.dtype, s.dims, origin=Origin.STATE) for s in states)
    names = {spec.name for spec in plain.outputs}
    outputs = (
        TensorSpec(s.output, s.dtype, s.dims, origin=Origin.STATE)
        for s in states
        if s.output not in names
    )
    return dataclasses.replace(
        plain, inputs=(*plain.inputs, *inputs), outputs=(*plain.outputs, *outputs)
    )


class Served:
    """A model with the states of its sequences, and a clock that tests set."""

    def __init__(
        self, settings: ModelConfig, model: Callable[..., Any], device: str = "cpu"
    ) -> None:
        self.now = 100.0
        module = model.to(device) if isinstance(model, nn.Module) else None
        signature = introspection.from_function(model if module is None else module.forward)
        loaded = Loaded(build.artifact(), model, signature, module)
        settings = binding.with_controls(settings, signature)
        self.engine = Engine(settings, loaded, torch.device(device))
        self.states = Sequences(self.engine.config, self.engine.device, lambda: self.now)
        self.run = self.engine.pipeline(steps=self.states)

    def send(self, *steps: RequestItem) -> list[Any]:
        """Return the first value of `y` of each outcome, or its error."""
        return [_first(outcome) for outcome in self.run(steps)]


def _first(outcome: Outcome) -> Any:
    if isinstance(outcome, BackendError) or not outcome:
        return outcome
    assert outcome.keys() == {"y"}
    return float(torch.as_tensor(outcome["y"]).flatten()[0])


def step(name: int | str, value: float, flags: str = "") -> RequestItem:
    """Return a step with `value` in four columns; flags: s for START, e for END."""
    row = np.full((1, 4), value, dtype=np.float32)
    return RequestItem({"x": row}, step=Step(name, "s" in flags, "e" in flags))
