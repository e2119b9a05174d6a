"""The schema of a model from runs with an example, or with made-up values for listed inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.autocomplete import specs
from torch_py_backend.autocomplete.specs import Schema
from torch_py_backend.batching.gather_scatter import Item
from torch_py_backend.batching.grouping import Grouping
from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.errors import ConfigError, ForwardError, InputError, join_names
from torch_py_backend.loading import example_inputs, registry
from torch_py_backend.loading.loaded import Loaded


def infer(
    config: ModelConfig, artifact: Artifact, device: torch.device, listed: Sequence[TensorSpec]
) -> Schema:
    """Run the model with the example, or with made-up values for listed inputs.

    Raises:
        ConfigError: there is neither an example nor listed inputs.
        ForwardError: forward() fails with the example.
    """
    runs = _Runs(config, registry.load(artifact, config, device), device)
    example = example_inputs.find(config, artifact)
    if listed:
        return runs.schema_of_listed(listed, example or {})
    if example is None:
        kind, signature = artifact.kind.value, runs.loaded.signature
        raise specs.no_example(config, f"{kind} does not define the shapes that {signature} takes")
    return runs.schema(example)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of a loaded model."""

    config: ModelConfig
    loaded: Loaded
    device: torch.device

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
        forms = [
            [(spec.name, spec.dtype, len(spec.dims)) for spec in outputs]
            for outputs in (schema.outputs, smaller.outputs)
        ]
        if forms[0] != forms[1]:
            raise ConfigError(
                self.config.name,
                "config.pbtxt lists no outputs, and the model returns other outputs for other"
                f" sizes: {join_names(map(str, schema.outputs))}, or"
                f" {join_names(map(str, smaller.outputs))}",
                cure="Write fixed sizes for the inputs, or write the outputs into config.pbtxt.",
            )
        return specs.with_varying(schema, smaller)

    def schema(self, item: Item) -> Schema:
        """Return the schema from a run with an item and one with twice its rows.

        The first dimension is the batch if it grows.
        """
        inputs = specs.of_values(self.config, item)
        outputs = self._call(item)
        first_dims = {spec.dims[:1] for spec in inputs}
        batched = len(first_dims) == 1 and first_dims != {()} and self._grows(item, outputs)
        return Schema(
            specs.row_specs(inputs, batched=batched),
            specs.row_specs(outputs, batched=batched),
            specs.batch_size(self.loaded.rows.most) if batched else 0,
        )

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
        guard = torch.inference_mode if config.options.inference_mode else torch.no_grad
        try:
            arguments = grouping.convert(group.inputs, columns)
            with guard(), self.device:
                arguments = [
                    argument.to(self.device) if isinstance(argument, Tensor) else argument
                    for argument in arguments
                ]
                result = group.inputs.call(self.loaded.module, arguments)
        except Exception as error:  # the model's own code runs here
            raise ForwardError(config.name, error, self.loaded.signature.name) from error
        return specs.of_parts(config, specs.named_parts(config, result, "forward()"))

    def _grows(self, example: Item, outputs: Sequence[TensorSpec]) -> bool:
        """Return whether the first dim of every output, and no other, doubles with the rows."""
        doubled: Item = {
            name: torch.cat([value, value])
            if isinstance(value, Tensor)
            else np.concatenate([value, value])
            for name, value in example.items()
        }
        try:
            twice = self._call(doubled)
        except ForwardError:
            return False
        rows = next(iter(example.values())).shape[0]
        grown = [(spec.name, (2 * rows, *spec.dims[1:])) for spec in outputs]
        return all(spec.dims[:1] == (rows,) for spec in outputs) and grown == [
            (spec.name, spec.dims) for spec in twice
        ]
