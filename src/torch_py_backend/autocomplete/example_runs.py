"""The schema of a model from runs with an example, or with made-up values for listed inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.autocomplete import specs
from torch_py_backend.autocomplete.specs import Schema
from torch_py_backend.batching import runtime
from torch_py_backend.batching.gather_scatter import Item
from torch_py_backend.batching.grouping import Grouping
from torch_py_backend.batching.runtime import Runtime
from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.errors import ForwardError, InputError
from torch_py_backend.loading import example_inputs
from torch_py_backend.loading.loaded import Loaded


def infer(
    config: ModelConfig,
    loaded: Loaded,
    device: torch.device,
    listed: Sequence[TensorSpec],
    example: Item | None,
) -> Schema:
    """Run the model with the example, or with made-up values for listed inputs.

    Raises:
        ConfigError: there is neither an example nor listed inputs.
        ForwardError: forward() fails with the example.
    """
    runs = _Runs(config, loaded, runtime.create(config.options, device, ()))
    if listed:
        return runs.schema_of_listed(listed, example or {})
    if example is None:
        kind, signature = loaded.kind.value, loaded.signature
        raise specs.no_example(config, f"{kind} does not define the shapes that {signature} takes")
    return runs.schema(example)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of a loaded model."""

    config: ModelConfig
    loaded: Loaded
    runtime: Runtime

    def schema_of_listed(self, listed: Sequence[TensorSpec], example: Item) -> Schema:
        """Return the schema for the inputs in the config, with the values that the warm-up uses.

        Inputs with dims of -1 are run in two sizes: output dims that differ between them are -1.
        """
        config = dataclasses.replace(self.config, inputs=tuple(listed))
        rows = 2 if self.config.max_batch_size else None
        valid = {
            spec.name: example[spec.name]
            for spec in listed
            if spec.name in example and example_inputs.fits(config, spec, example[spec.name])
        }
        schema = self.schema(example_inputs.item(config, rows, example=valid))
        if all(-1 not in spec.dims for spec in listed):
            return schema
        try:
            smaller = self.schema(example_inputs.item(config, rows, shrunk=True, example=valid))
        except ForwardError:
            return schema  # the model takes the sizes of the example only
        return specs.with_varying(config, schema, smaller)

    def schema(self, item: Item) -> Schema:
        """Return the schema from a run with an item and one with twice its rows.

        The first dimension is the batch if it, and no other, doubles in every output.
        """
        inputs, outputs = specs.of_values(self.config, item), self._call(item)
        batched = len({spec.dims[:1] for spec in inputs}) == 1 and bool(inputs[0].dims)
        if batched:
            rows = inputs[0].dims[0]
            grown = [
                dataclasses.replace(spec, dims=(2 * rows, *spec.dims[1:]))
                for spec in outputs
                if spec.dims[:1] == (rows,)
            ]
            doubled: Item = {
                name: torch.cat([value, value])
                if isinstance(value, Tensor)
                else np.concatenate([value, value])
                for name, value in item.items()
            }
            try:
                batched = grown == [*self._call(doubled)]
            except ForwardError:
                batched = False
        return specs.schema_of(inputs, outputs, self.loaded.rows.most, batched=batched)

    def _call(self, item: Item) -> tuple[TensorSpec, ...]:
        """Return the specs of all outputs."""
        config = dataclasses.replace(
            self.config, max_batch_size=0, inputs=specs.of_values(self.config, item)
        )
        grouping = Grouping(config, self.loaded.signature)
        admitted = grouping.admit(item)
        if isinstance(admitted, InputError):
            raise admitted
        (group,) = grouping.group([(0, admitted)])
        columns = [admitted[name] for name in group.inputs.names]
        try:
            with self.runtime.guard():
                arguments = grouping.convert(group.inputs, self.runtime.to_device(columns))
                result = group.inputs.call(self.loaded.module, arguments)
        except Exception as error:  # the model's own code runs here
            raise ForwardError(config.name, error, self.loaded.signature.name) from error
        return specs.of_result(config, result, "forward()")
