"""The pipeline of a model with hooks: prepare rows, make batches, call the module, finish rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.batching import gather_scatter, trees
from torch_py_backend.batching.gather_scatter import Item, Value
from torch_py_backend.batching.grouping import MAX_SETS, Group
from torch_py_backend.batching.output_extraction import Finite, OutputExtractor
from torch_py_backend.batching.runtime import Runtime
from torch_py_backend.config import request_parameters
from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.config.request_parameters import Parameters
from torch_py_backend.errors import InputError, OutputError, a_type, summarize
from torch_py_backend.hooks.preprocessing import (
    NUMBERED,
    ROWS,
    BatchPreprocessor,
    RowParameters,
    RowPreprocessor,
)
from torch_py_backend.hooks.user_hooks import Hooks, Tree
from torch_py_backend.signature.arguments import ArgumentType, Signature
from torch_py_backend.signature.binding import bind_inputs
from torch_py_backend.signature.calls import InputBinding

# The module of the model, or the function that is served instead.
Module: TypeAlias = "Callable[..., Tree]"

# The name of an outcome's only column before postprocess().
UNPROCESSED = (ROWS,)


def copy_rows(column: Value) -> Value:
    """Copy the results of rows that `HookedPipeline.split` returned, including their tensors."""
    return request_parameters.column(map(trees.clone, request_parameters.values(column)))


class HookedPipeline:
    """The stages before and after the engine's own for a model with hooks.

    It takes the place of `Grouping`: `prepare` prepares items, `group` groups them, and each group
    has the function that calls the module.

    Raises:
        BindingError: the config's inputs do not match the signature of the hooks or the module.
    """

    def __init__(
        self, config: ModelConfig, signature: Signature, hooks: Hooks, runtime: Runtime
    ) -> None:
        self.hooks = hooks
        self._model = config.name
        self._batched = config.max_batch_size > 0
        self._signature = signature
        self._runtime = runtime
        dtype = config.options.weights_dtype
        self._dtype = getattr(torch, dtype) if dtype else None
        # Names from hooks are argument names; names from the config may be bound in order.
        self._ordered = not (hooks.preprocess or hooks.preprocess_batch or hooks.collate)
        self._preprocessor: BatchPreprocessor | RowPreprocessor
        if hooks.preprocess is None and hooks.collate is None:
            self._preprocessor = BatchPreprocessor(config, hooks.preprocess_batch, signature)
        else:
            self._preprocessor = RowPreprocessor(config, hooks)
        self.places = self._preprocessor.grouping.places
        self.patterns = self._preprocessor.grouping.patterns
        # Request parameters stay with the rows, for hooks after preprocess().
        self._passes_parameters = hooks.takes_parameters
        self._bound: dict[tuple[str, ...], InputBinding] = {}
        self._specs = {spec.name: spec for spec in config.outputs}
        row_config = dataclasses.replace(config, max_batch_size=0)
        self._extractor = OutputExtractor(row_config, "postprocess()")
        self._finite = Finite(config) if config.options.check_finite else None

    # --- before the module ---------------------------------------------------------------------

    def prepare(self, item: Item) -> Item:
        """Return a request's prepared item.

        Raises:
            BackendError: a hook fails, or the request is refused.
        """
        item = dict(item)
        parameters = request_parameters.pop(item)
        prepared = self._preprocessor.prepare(item, parameters)
        if not self._passes_parameters:
            return prepared
        first = next(iter(prepared.values()), None)
        rows = first.shape[0] if self._batched and first is not None else 1
        return {**prepared, request_parameters.KEY: request_parameters.column([parameters] * rows)}

    def group(self, items: Sequence[tuple[int, Item]]) -> list[Group]:
        """Group items that can share a call."""
        by_position = dict(items)
        extra = (request_parameters.KEY,) if self._passes_parameters else ()
        without_parameters = [
            (position, {name: item[name] for name in item if name not in extra})
            for position, item in items
        ]
        return [
            Group(self._bind(inputs, extra), [by_position[at] for at in positions], positions)
            for inputs, _, positions in self._preprocessor.group(without_parameters)
        ]

    @property
    def prepares(self) -> bool:
        """Whether `prepare` is needed for each request, not only checks of its inputs."""
        return isinstance(self._preprocessor, RowPreprocessor) or self._passes_parameters

    @property
    def takes_arrays(self) -> bool:
        """As `Grouping.takes_arrays`."""
        return not self.prepares and self._preprocessor.grouping.takes_arrays

    def alike(self, items: Sequence[Any]) -> bool:
        """As `Grouping.alike`."""
        return not self.prepares and self._preprocessor.grouping.alike(items)

    def admit(self, item: Item) -> Item | InputError:
        """As `Grouping.admit`; a prepared item was checked before."""
        return item if self.prepares else self._preprocessor.grouping.admit(item)

    @property
    def binding(self) -> InputBinding:
        """How items with all inputs are passed to hooks for batches."""
        return self._bind(self._preprocessor.grouping.binding)

    def _bind(self, inputs: InputBinding, extra: tuple[str, ...] = ()) -> InputBinding:
        """Return how columns, and those of parameters, are passed to the hooks and the module."""
        types = (*inputs.types, *(ArgumentType.TENSOR,) * len(extra))
        call = partial(self._call, inputs)
        return InputBinding((*inputs.names, *extra), types, call, inputs.places)

    # --- the module ----------------------------------------------------------------------------

    def _call(self, inputs: InputBinding, module: Module, columns: Sequence[Value]) -> Tree:
        """Return the module's result for a batch, after postprocess_batch() if there is one."""
        parameters: RowParameters = ()
        if self._passes_parameters:
            *columns, last = columns
            parameters = request_parameters.values(last)
        prepared = self._preprocessor.batch(inputs, columns, parameters)
        batch = trees.to_device(prepared, self._runtime.device, self._dtype)
        result = self._call_module(module, batch)
        if self.hooks.postprocess_batch is not None:
            result = self.hooks.postprocess_batch.with_parameters(parameters)(result)
        return result

    def _call_module(self, module: Module, batch: Tree) -> Tree:
        """Call the module with a dict of named arguments, a tuple of arguments, or one argument."""
        if isinstance(batch, Mapping):
            named = {str(name): value for name, value in batch.items()}
        elif self._signature.leaves is None:
            return module(*batch) if isinstance(batch, tuple) else module(batch)
        else:
            parts = batch if isinstance(batch, tuple) else (batch,)
            named = {f"{NUMBERED}{number}": value for number, value in enumerate(parts)}
        names = tuple(named)
        inputs = self._bound.get(names)
        if inputs is None:
            inputs = bind_inputs(self._model, names, self._signature, ordered=self._ordered)
            if len(self._bound) < MAX_SETS:  # hooks may pass only what a client has sent
                self._bound[names] = inputs
        return inputs.call(module, [named[name] for name in inputs.names])

    # --- after the module ----------------------------------------------------------------------

    def split(self, result: Tree, rows: int) -> list[Value]:
        """Split a batch's result into a column of results of rows.

        Raises:
            OutputError: a part of the result has another number of rows.
        """
        result = trees.to_device(result, torch.device("cpu"))
        parts = trees.split(self._model, result, rows) if self._batched else [result]
        return [request_parameters.column(parts)]

    @property
    def postprocesses(self) -> bool:
        """Whether outcomes hold results of `split`, which `finish` converts to outputs."""
        return self.hooks.postprocess is not None

    def finish(self, outcome: Mapping[str, Value], item: Item) -> dict[str, Value]:
        """Return one request's outputs: call postprocess() for each of its rows.

        Args:
            outcome: the request's part of the column from `split`.
            item: the prepared item.

        Raises:
            BackendError: postprocess() fails, or its result contradicts the config.
        """
        results = request_parameters.values(outcome[ROWS])
        parameters: Sequence[Parameters] = [{}] * len(results)
        if self._passes_parameters:
            parameters = request_parameters.values(item[request_parameters.KEY])
        rows = [
            self._extractor.extract(self._converted(self._postprocess(result, sent)), 1)
            for result, sent in zip(results, parameters, strict=True)
        ]
        outputs: dict[str, Value] = {}
        for name, column in zip(self._specs, zip(*rows, strict=True), strict=True):
            stack: Callable[..., Value] = torch.stack if isinstance(column[0], Tensor) else np.stack
            try:
                outputs[name] = stack(column) if self._batched else column[0]
            except (RuntimeError, ValueError):
                shapes = [list(value.shape) for value in column]
                raise OutputError(
                    self._model,
                    f"postprocess() gives output '{name}' other shapes for other rows of one"
                    f" request: {shapes[:3]}",
                    expected="one shape for all",
                ) from None
        if self._finite is not None and (refusal := self._finite.refusal(outputs)) is not None:
            raise refusal
        return outputs

    def _postprocess(self, result: Tree, parameters: Parameters) -> Tree:
        assert self.hooks.postprocess is not None  # noqa: S101  checked by `postprocesses`
        return self.hooks.postprocess.with_parameters(parameters)(result)

    def _converted(self, result: Tree) -> Tree:
        """Convert lists and numbers in the result of postprocess() to the types of the outputs."""
        if isinstance(result, Mapping):
            return {
                name: self._convert(self._specs[name], part) if name in self._specs else part
                for name, part in result.items()
            }
        if len(self._specs) == 1 and not isinstance(result, tuple):
            (spec,) = self._specs.values()
            return self._convert(spec, result)
        return result

    def _convert(self, spec: TensorSpec, part: Tree) -> Tree:
        """Convert a list to the output's type without loss, and a number of numpy to Python's."""
        if isinstance(part, np.generic):
            return part.item()
        if not isinstance(part, list | tuple):
            return part
        if spec.dtype.torch is None:
            return np.array(part, dtype=np.object_)
        dtype: torch.dtype = getattr(torch, spec.dtype.torch)
        try:
            tensor, converted = torch.as_tensor(part), torch.tensor(part, dtype=dtype)
        except Exception as error:  # tensors, strings, ragged lists, numbers that are too large
            raise OutputError(
                self._model,
                f"postprocess() gives {a_type(part)} for output '{spec.name}': {summarize(error)}",
                expected=str(spec),
            ) from None
        both_bool = (tensor.dtype is torch.bool) is (dtype is torch.bool)
        lossless = not part or (both_bool and torch.can_cast(tensor.dtype, dtype))
        return converted if lossless else tensor  # of another type, which the extractor refuses

    # --- without a config ----------------------------------------------------------------------

    def run_unchecked(self, module: Module, item: Item) -> tuple[Tree, bool]:
        """Return the unchecked result of a request, and whether it is the result of one row.

        Raises:
            BackendError: a hook fails, or refuses the item.
        """
        ((inputs, items, _),) = self.group([(0, self.prepare(item))])
        columns = gather_scatter.gather(items, inputs.names).columns
        result = inputs.call(module, columns)
        if self.hooks.postprocess is None:
            return result, False
        rows = columns[0].shape[0] if self._batched else 1
        (column,) = self.split(result, rows)
        return self._postprocess(request_parameters.values(column)[0], {}), True
