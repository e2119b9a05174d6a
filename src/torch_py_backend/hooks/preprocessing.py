"""Preprocessing by hooks: row by row, or a whole batch at once."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.batching.gather_scatter import Item, Value, to_column
from torch_py_backend.batching.grouping import Group, Grouping, count_rows
from torch_py_backend.config import request_parameters
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.config.request_parameters import Parameters
from torch_py_backend.errors import BindingError, InputError, OutputError, a_type
from torch_py_backend.hooks.user_hooks import Hook, Hooks, Tree
from torch_py_backend.signature.arguments import Argument, ArgumentType, Passing, Signature
from torch_py_backend.signature.binding import bind_inputs
from torch_py_backend.signature.calls import InputBinding

# The name of an item's only column between preprocess() and collate().
ROWS = "rows"
# The prefix of the names of unnamed results of preprocess().
NUMBERED = "INPUT__"

RowParameters: TypeAlias = "Sequence[Parameters]"


class BatchPreprocessor:
    """Batches the requests' inputs for preprocess_batch(), or for the module.

    Attributes:
        grouping: checks and groups the requests' items.

    Args:
        hook: preprocess_batch; None: the class does not define it.
        signature: that of the module.
    """

    def __init__(self, config: ModelConfig, hook: Hook | None, signature: Signature) -> None:
        self._hook = hook
        if hook is not None:
            signature = hook.signature()
            _check_annotations(config, signature)
        self.grouping = Grouping(config, signature)

    def prepare(self, item: Item, _: Parameters) -> Item:
        return _admit(self.grouping, item)

    def group(self, items: Sequence[tuple[int, Item]]) -> list[Group]:
        return self.grouping.group(items)

    def batch(
        self, inputs: InputBinding, columns: Sequence[Value], parameters: RowParameters
    ) -> Tree:
        """Return the argument for the module's call."""
        passed = self.grouping.convert(inputs, columns)
        if self._hook is None:
            return dict(zip(inputs.names, passed, strict=True))
        return inputs.call(self._hook.with_parameters(parameters), passed)


class RowPreprocessor:
    """Prepares each row of a request separately; collate() makes batches, or rows are stacked.

    Attributes:
        grouping: checks rows, each like a request of a model without a batch dimension.

    Args:
        hooks: without preprocess(), a row is a dict of its inputs; without collate(), rows with
            equal shapes share a batch.
    """

    def __init__(self, config: ModelConfig, hooks: Hooks) -> None:
        self._model = config.name
        self._batched = config.max_batch_size > 0
        self._preprocess, self._collate = hooks.preprocess, hooks.collate
        self._axes = {spec.name: len(spec.dims) + 1 for spec in config.inputs}
        if hooks.preprocess is None:
            signature = _of_row(config)
        else:
            signature = hooks.preprocess.signature()
            _check_annotations(config, signature)
        self.grouping = Grouping(dataclasses.replace(config, max_batch_size=0), signature)

    def prepare(self, item: Item, parameters: Parameters) -> Item:
        """Return the prepared rows of a request.

        Raises:
            InputError: a row is refused, or the request has no rows.
        """
        rows = [self._prepare_row(row, parameters) for row in self._split(item)]
        if self._collate is not None:
            return {ROWS: request_parameters.column(rows)}
        return self._stacked([self._tensors(row) for row in rows])

    def _split(self, item: Item) -> list[Item]:
        """Return each row of a request as an item."""
        if not self._batched:
            return [item]
        count = count_rows(self._model, item, self._axes)
        if isinstance(count, InputError):
            raise count
        if count == 0:
            raise InputError(self._model, "the request has no rows")
        return [{name: value[row, ...] for name, value in item.items()} for row in range(count)]

    def _prepare_row(self, row: Item, parameters: Parameters) -> Tree:
        """Return the result of preprocess() for one row."""
        admitted = _admit(self.grouping, row)
        ((inputs, _, _),) = self.grouping.group([(0, admitted)])
        columns = [to_column(admitted[name]) for name in inputs.names]
        call = dict if self._preprocess is None else self._preprocess.with_parameters(parameters)
        return inputs.call(call, self.grouping.convert(inputs, columns))

    def _stacked(self, rows: Sequence[Mapping[str, Tensor]]) -> Item:
        """Return the item of a request's rows."""
        if not self._batched:
            return {**rows[0]}
        try:
            return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        except (RuntimeError, LookupError):
            shapes = {name: list(tensor.shape) for name, tensor in rows[0].items()}
            raise OutputError(
                self._model,
                f"preprocess() returned {shapes} and others for rows of one request",
                expected="the same names and shapes for each",
                cure="Or write collate(), which makes a batch of them.",
            ) from None

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

    def group(self, items: Sequence[tuple[int, Item]]) -> list[Group]:
        """Group items that can share a batch."""
        groups: dict[object, list[tuple[int, Item]]] = {}
        for position, item in items:
            key: object = None  # collate() makes a batch of any rows
            if not self._batched:
                key = position
            elif self._collate is None:
                key = tuple(
                    (name, value.shape[1:], value.dtype, value.device)
                    for name, value in item.items()
                    if isinstance(value, Tensor)
                )
            groups.setdefault(key, []).append((position, item))
        return [
            Group(
                _named_only(members[0][1]),
                [item for _, item in members],
                [position for position, _ in members],
            )
            for members in groups.values()
        ]

    def batch(
        self, inputs: InputBinding, columns: Sequence[Value], parameters: RowParameters
    ) -> Tree:
        """Return the argument for the module's call."""
        if self._collate is not None:
            # A retry passes the same rows, and some functions remove entries of their rows.
            rows = [
                copy.copy(row) if isinstance(row, MutableMapping | list) else row
                for row in request_parameters.values(columns[0])
            ]
            return self._collate.with_parameters(parameters)(rows)
        return dict(zip(inputs.names, columns, strict=True))


def _admit(grouping: Grouping, item: Item) -> Item:
    """Return an item as the grouping admits it, or raise the reason to refuse it."""
    admitted = grouping.admit(item)
    if isinstance(admitted, InputError):
        raise admitted
    return admitted


def _named_only(item: Item) -> InputBinding:
    """Return a binding with the names of an item; `HookedPipeline` calls the module itself."""
    return InputBinding(tuple(item), (ArgumentType.TENSOR,) * len(item), lambda *_: None)


def _of_row(config: ModelConfig) -> Signature:
    """Return the signature of a function that takes each input of one row by its name."""
    arguments = []
    for spec in config.inputs:
        takes = ArgumentType.TENSOR
        if spec.dtype.torch is None:
            takes = ArgumentType.RAW if spec.dims in ((), (1,)) else ArgumentType.BYTES
        arguments.append(Argument(spec.name, not spec.optional, Passing.KEYWORD, takes, spec.name))
    return Signature(tuple(arguments), name="collate")


def _check_annotations(config: ModelConfig, signature: Signature) -> None:
    """Refuse hooks without annotations for strings, and preprocess_batch() that takes scalars."""
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
