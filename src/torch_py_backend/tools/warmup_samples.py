"""The samples of `model_warmup` in config.pbtxt, which Triton itself sends before READY."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import numpy as np
import torch

from torch_py_backend.batching.gather_scatter import Item, Value
from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.config.pbtxt import Document
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, summarize
from torch_py_backend.loading import example_inputs

log = logging.getLogger(__name__)


def warn_of_failures(engine: Engine, samples: Sequence[Document]) -> None:
    """Run the model with each sample, and log a warning for each that fails.

    Samples of sequences and of decoupled models are not tried.
    """
    config = engine.config
    for sample in samples if not (config.sequencing or config.decoupled) else ():
        error = _failure(engine, sample)
        if error:
            log.warning(
                "model '%s': the sample '%s' of model_warmup fails, and tritonserver 24.10 may die"
                " of that, with all models: %s. Correct the sample, or remove model_warmup: this"
                " backend warms up without it.",
                config.name,
                sample["name"],
                error,
            )


def _failure(engine: Engine, sample: Document) -> str:
    """Return why a sample fails; empty if it does not."""
    try:
        item = _item(engine.config, sample)
    except (OSError, ValueError, RuntimeError) as error:
        return f"its values cannot be read: {summarize(error)}"
    outcomes = engine.run(example_inputs.requests(engine.config, item))
    errors = [outcome for outcome in outcomes if isinstance(outcome, BackendError)]
    return str(errors[0]).rstrip(".") if errors else ""


def _item(config: ModelConfig, sample: Document) -> Item:
    specs = {spec.name: spec for spec in config.inputs}
    return {
        name: _value(config, specs[name], entry, int(sample["batch_size"]))
        for name, entry in sample["inputs"].items()
        if name in specs
    }


def _value(config: ModelConfig, spec: TensorSpec, entry: Document, rows: int) -> Value:
    """Return the value of an input as Triton makes it; random strings are empty."""
    dims = spec.dims if spec.reshaped else [int(size) for size in entry["dims"]]
    shape = [rows, *dims] if config.max_batch_size else dims
    file = entry.get("input_data_file")
    data = (config.folder / "warmup" / file).read_bytes() if file else b""
    if spec.dtype.torch is None:
        strings: list[bytes] = []
        while data:
            size = int.from_bytes(data[:4], "little")
            strings.append(data[4 : 4 + size])
            data = data[4 + size :]
        filled = strings or [b""] * int(np.prod(shape))
        return np.array(filled, dtype=np.object_).reshape(shape)
    value = torch.zeros(shape, dtype=getattr(torch, spec.dtype.torch))
    if "random_data" in entry:
        data = random.Random(0).randbytes(value.nbytes)  # noqa: S311  no secret
    if data:
        value = torch.frombuffer(bytearray(data), dtype=value.dtype).reshape(shape)
    return value
