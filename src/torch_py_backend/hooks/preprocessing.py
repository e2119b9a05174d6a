"""Preprocessing by hooks, row by row; checks of the hooks for inputs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend import values
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import BackendError, BindingError, InputError, OutputError, a_type
from torch_py_backend.hooks.user_hooks import Hook, Hooks, Tree
from torch_py_backend.pipeline.inputs import Inputs
from torch_py_backend.signature.arguments import Argument, ArgumentType, Passing, Signature
from torch_py_backend.signature.binding import bind_inputs
from torch_py_backend.signature.calls import InputBinding
from torch_py_backend.values import Item, Parameters

# The name of the only column of an item before collate(), and of an outcome before postprocess().
ROWS = "rows"
# The prefix of the names of unnamed results of preprocess().
NUMBERED = "INPUT__"

RowParameters: TypeAlias = "Sequence[Parameters]"


class RowPreprocessor:
    """Prepares each row of a request separately; collate() makes batches, or rows are stacked.

    A prepared item has one column, ROWS, of what preprocess() returned for each row.

    Args:
        hooks: without preprocess(), a row is a dict of its inputs; without collate(), rows with
            equal shapes share a batch.

    Attributes:
        inputs: checks rows, each like a request of a model without a batch dimension.
    """

    def __init__(self, config: ModelConfig, hooks: Hooks) -> None:
        self._model = config.name
        self._batched = config.max_batch_size > 0
        self._hook, self._collate = hooks.preprocess, hooks.collate
        signature = _of_row(config) if self._hook is None else hook_signature(config, self._hook)
        self.inputs = Inputs(dataclasses.replace(config, max_batch_size=0), signature)
        # Calls preprocess() with the inputs of a row, and the parameters behind them.
        self._rows = self.inputs.stage(lambda binding: partial(self._call, binding))

    def _call(self, binding: InputBinding, *passed: Any) -> Tree:
        *columns, parameters = passed
        if self._hook is None:
            return dict(zip(binding.names, columns, strict=True))
        return binding.call(self._hook.with_parameters(parameters), columns)

    def prepare(self, item: Item) -> Item:
        """Return the prepared rows of a request.

        Raises:
            InputError: a row is refused, or the request has no rows.
        """
        parameters = values.parameters(item)
        rows = [self._prepare_row(row, parameters) for row in self._split(item)]
        if self._collate is None:
            rows = [self._tensors(row) for row in rows]
            if len(rows) > 1 and len(set(map(_key, rows))) > 1:
                raise OutputError(
                    self._model,
                    f"preprocess() returned {_shapes(rows[0])} and others for rows of one request",
                    expected="the same names and shapes for each",
                    cure="Or write collate(), which makes a batch of them.",
                )
        return {ROWS: values.objects(rows)}

    def _split(self, item: Item) -> list[Item]:
        """Return each row of a request as an item."""
        if not self._batched:
            return [item]
        count = self.inputs.count_rows(item)
        if isinstance(count, InputError):
            raise count
        if count == 0:
            raise InputError(self._model, "the request has no rows")
        return [{name: value[row, ...] for name, value in item.items()} for row in range(count)]

    def _prepare_row(self, row: Item, parameters: Parameters) -> Tree:
        """Return the result of preprocess() for one row."""
        (entry,), groups = self._rows([row])
        if isinstance(entry, BackendError):
            raise entry
        columns, _ = groups[0].gather(groups[0].items)
        return groups[0].call(*columns, parameters)

    def _tensors(self, row: Tree) -> dict[str, Tensor]:
        """Return the tensors of a row by name, or by number if they have no names."""
        if not isinstance(row, Mapping):
            parts = row if isinstance(row, tuple) else (row,)
            row = {f"{NUMBERED}{number}": part for number, part in enumerate(parts)}
        tensors = {}
        for name, value in row.items():
            try:
                # torch takes no negative strides.
                part = np.asarray(value, order="C") if isinstance(value, np.ndarray) else value
                # as_tensor() would move a tensor to torch's default device.
                tensors[str(name)] = part if isinstance(part, Tensor) else torch.as_tensor(part)
            except Exception:  # an object of the user may raise any class
                raise OutputError(
                    self._model,
                    f"preprocess() returned {a_type(value)}, which cannot be batched",
                    expected="a tensor or numbers; a tuple of these, or a dict by the names of"
                    " forward()'s arguments",
                    cure="Or write collate(), which makes a batch of anything.",
                ) from None
        return tensors

    def key(self, item: Item) -> Hashable:
        """Return what prepared items of one batch have in common."""
        rows: Any = item[ROWS]
        return None if self._collate is not None else _key(rows[0])

    def batch(self, rows: list[Tree], parameters: RowParameters) -> Tree:
        """Return the argument for the module's call."""
        if self._collate is not None:
            # A retry passes the same rows, and some functions remove entries of their rows.
            copies = [
                copy.copy(row) if isinstance(row, MutableMapping | list) else row for row in rows
            ]
            return self._collate.with_parameters(parameters)(copies)
        if not self._batched:
            return rows[0]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _key(row: Mapping[str, Tensor]) -> Hashable:
    return tuple([(name, part.shape, part.dtype, part.device) for name, part in row.items()])


def _shapes(row: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(part.shape) for name, part in row.items()}


def _of_row(config: ModelConfig) -> Signature:
    """Return the signature of a function that takes each input of one row by its name."""
    arguments = []
    for spec in config.inputs:
        takes = ArgumentType.TENSOR
        if spec.dtype.torch is None:
            takes = ArgumentType.RAW if spec.dims in ((), (1,)) else ArgumentType.BYTES
        arguments.append(Argument(spec.name, not spec.optional, Passing.KEYWORD, takes, spec.name))
    return Signature(tuple(arguments), name="collate")


def hook_signature(config: ModelConfig, hook: Hook) -> Signature:
    """Return the signature of a hook for inputs.

    Raises:
        BindingError: it has no annotations for strings, or takes scalars for a batch.
    """
    signature = hook.signature()
    names = [spec.name for spec in config.inputs]
    strings = {spec.name for spec in config.inputs if spec.dtype.torch is None}
    inputs = bind_inputs(config.name, names, signature)
    for name, takes in zip(inputs.names, inputs.types, strict=True):
        if name in strings and takes is ArgumentType.TENSOR:
            raise BindingError(
                config.name,
                f"input '{name}' is BYTES, and {signature} has no annotation for it",
                expected="an annotation: bytes or str for one a row, list[bytes] or list[str]",
            )
        if takes.scalar and signature.name == "preprocess_batch":
            raise BindingError(
                config.name,
                f"{signature} takes {takes.value} for the input '{name}', and gets those of all"
                " rows",
                expected="a Tensor, list[str] or list[bytes]",
                cure="Or name it preprocess, which is called for each row.",
            )
    return signature
