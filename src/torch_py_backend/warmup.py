"""Sample batches before READY: nothing that a first call costs is left for a request."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch_py_backend import compilation, samples
from torch_py_backend.batching import Item
from torch_py_backend.config import ModelConfig
from torch_py_backend.engine import Engine
from torch_py_backend.errors import BackendError, LoadError, WarmupError

# TorchScript's profiling executor optimises at the third call of a shape.
_REPEATS = 3
# Sizes for dimensions of -1: two, so that torch.compile learns that they vary; above 1, which it
# would take for a constant.
_VARIABLE = (8, 6)


def run(engine: Engine) -> None:
    """Call the engine with samples of every kind of batch.

    Raises:
        LoadError: binding the outputs to forward()'s result failed.
        WarmupError: forward() failed, or its result contradicts the config.
    """
    for item in batches(engine.config):
        for _ in range(_REPEATS):
            (outcome,) = engine.run([item])
            if isinstance(outcome, BackendError):
                raise _refusal(engine.config, item, outcome)


def _refusal(config: ModelConfig, item: Item, error: BackendError) -> LoadError:
    if isinstance(error, LoadError):
        return error
    tried = ", ".join(f"{name} {list(value.shape)}" for name, value in item.items())
    return WarmupError(
        config.name,
        f"the warm-up with {tried} failed: {error}",
        cure="Correct the model or its config; if it cannot take made-up values (ones, random"
        ' numbers below 1, the string "text"), set the parameter WARMUP to "false".',
    )


def batches(config: ModelConfig) -> Iterator[Item]:
    """One item for every batch that may need preparation of its own."""
    varies = any(-1 in spec.dims for spec in config.inputs)
    may_lack = any(spec.optional for spec in config.inputs)
    for rows, size, optional in itertools.product(
        _row_counts(config), _VARIABLE if varies else (1,), (True, False) if may_lack else (True,)
    ):
        yield samples.item(config, rows, size, optional=optional)


def _row_counts(config: ModelConfig) -> Sequence[int | None]:
    largest = config.max_batch_size
    if largest == 0:
        return [None]
    if compilation.requested(config) and _one_graph_each(config):
        return list(range(largest, 0, -1))
    # torch.compile makes the batch dimension dynamic at the second size, and 1 is special to it.
    return sorted({largest, max(1, largest - 1), 1}, reverse=True)


def _one_graph_each(config: ModelConfig) -> bool:
    return (config.options.torch_compile_optional_parameters or {}).get("dynamic") is False
