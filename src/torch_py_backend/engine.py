"""Builds a model once; then runs items: check → group → gather → call → outputs → scatter.

Inside the engine an error is a value: each item gets a result or the error that is its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_py_backend import artifacts, batching, binding, compilation, loaders, runtime
from torch_py_backend.batching import Batch, Item, Outcome
from torch_py_backend.config import ModelConfig, TensorSpec
from torch_py_backend.errors import BackendError, ForwardError, InputError, OutputError
from torch_py_backend.threads import Threads

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Expected:
    """An output as the config has it, in torch's terms. dims: with the batch dimension as -1."""

    spec: TensorSpec
    dtype: torch.dtype
    dims: tuple[int, ...]


def build(config: ModelConfig, threads: Threads) -> Engine:
    """Load what the config describes.

    Raises:
        LoadError: it cannot be served; the message says why.
    """
    runtime.settle(config.options, threads)
    device = runtime.placement(config)
    artifact = artifacts.find(config)
    loaded = loaders.load(artifact, config, device)
    inputs = binding.bind_inputs(
        config.name, [spec.name for spec in config.inputs], loaded.arguments
    )
    surroundings = runtime.surround(config.options, device, loaded.weights)
    module = compilation.apply(config, artifact.kind, loaded.module)
    return Engine(config, module, inputs, surroundings)


class Engine:
    """One model, ready to be called from one thread."""

    def __init__(
        self,
        config: ModelConfig,
        module: Any,
        inputs: binding.Inputs,
        surroundings: runtime.Runtime,
    ) -> None:
        self.config = config
        self._module = module
        self._inputs = inputs
        self._runtime = surroundings
        self._batched = config.max_batch_size > 0
        self._names = tuple(spec.name for spec in config.outputs)
        self._expected = tuple(_expect(spec, batched=self._batched) for spec in config.outputs)
        # The result's structure is known once forward() has returned one.
        self._outputs: binding.Outputs | None = None

    def run(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome for each item, in their order."""
        outcomes: list[Outcome | None] = [self._check(item) for item in items]
        sound = [position for position, error in enumerate(outcomes) if error is None]
        for positions in self._group([items[position] for position in sound]):
            members = [sound[position] for position in positions]
            for position, outcome in zip(
                members, self._run_batch([items[position] for position in members]), strict=True
            ):
                outcomes[position] = outcome
        if self._runtime.clean is not None:
            self._runtime.clean()
        return outcomes  # type: ignore[return-value]  # every position is filled by now

    def _check(self, item: Item) -> BackendError | None:
        """What is wrong with an item before it meets others, or None."""
        rows = -1
        for name in self._inputs.names:
            tensor = item.get(name)
            if tensor is None:
                return InputError(self.config.name, f"the request lacks the input '{name}'")
            if not self._batched:
                continue
            if rows not in (-1, tensor.shape[0]):
                return InputError(
                    self.config.name,
                    f"the request's inputs have {rows} and {tensor.shape[0]} rows",
                    expected="the same number of rows in each",
                )
            rows = tensor.shape[0]
        return None

    def _group(self, items: Sequence[Item]) -> list[list[int]]:
        if not self._batched:
            return [[position] for position in range(len(items))]
        return batching.group(items, self._inputs.names) if items else []

    def _run_batch(self, items: Sequence[Item]) -> Sequence[Outcome]:
        try:
            with self._runtime.guard():
                batch = batching.gather(items, self._inputs.names)
                columns = self._runtime.to_device(batch.columns)
                result = self._inputs.call(self._module, columns)
                outputs = self._runtime.to_host(self._take(result, batch))
            return batching.scatter(outputs, self._names, batch.sizes)
        except BackendError as error:
            return [error] * len(items)
        except (Exception, SystemExit) as error:
            log.exception("model '%s': forward() failed", self.config.name)
            return [ForwardError(self.config.name, error)] * len(items)

    def _take(self, result: Any, batch: Batch) -> list[Tensor]:
        """The configured outputs, contiguous, each as the config says."""
        if self._outputs is None:
            self._outputs = binding.bind_outputs(self.config.name, self._names, result)
        try:
            parts = self._outputs(result)
        except (LookupError, AttributeError, TypeError):
            raise OutputError(
                self.config.name,
                f"forward() returned a {type(result).__name__} unlike its first result",
                expected=f"the outputs {', '.join(self._names)}",
            ) from None
        rows = sum(batch.sizes)
        return [
            self._verify(expected, part, rows)
            for expected, part in zip(self._expected, parts, strict=True)
        ]

    def _verify(self, expected: _Expected, part: object, rows: int) -> Tensor:
        if not isinstance(part, Tensor):
            raise OutputError(
                self.config.name,
                f"output '{expected.spec.name}' is a {type(part).__name__}",
                expected="a torch.Tensor",
            )
        shape = part.shape
        if part.dtype is not expected.dtype or not _fits(shape, expected.dims):
            raise self._mismatch(expected, part)
        if self._batched and shape[0] != rows:
            raise OutputError(
                self.config.name,
                f"output '{expected.spec.name}' has {shape[0]} rows for a batch of {rows}",
                expected="as many rows as the inputs have",
            )
        # Triton's utilities read the memory as if it were contiguous, and numpy takes no tensor
        # that requires a gradient or carries a pending negation.
        if part.requires_grad or part.is_neg():
            return part.detach().resolve_neg().contiguous()
        return part.contiguous()

    def _mismatch(self, expected: _Expected, part: Tensor) -> OutputError:
        dims = ", ".join(map(str, expected.dims))
        return OutputError(
            self.config.name,
            f"output '{expected.spec.name}' is {_short(part.dtype)} {list(part.shape)}",
            expected=f"{_short(expected.dtype)} [{dims}] as in config.pbtxt",
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fits(shape: torch.Size, dims: tuple[int, ...]) -> bool:
    if shape == dims:
        return True
    return len(shape) == len(dims) and all(
        wanted in (-1, size) for size, wanted in zip(shape, dims, strict=True)
    )


def _expect(spec: TensorSpec, *, batched: bool) -> _Expected:
    dims = (-1, *spec.dims) if batched else spec.dims
    return _Expected(spec, getattr(torch, spec.dtype.torch or ""), dims)
