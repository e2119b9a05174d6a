"""The stages of a model with hooks: prepare rows, make batches, call the module.

A prepared item has one column, ROWS, of what preprocess() returned for each row. collate() makes a
batch of prepared rows, or rows of equal shapes are stacked.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend import values
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import BackendError, InputError, OutputError, a_type
from torch_py_backend.loading.hooks import Hooks, hook_signature, row_signature
from torch_py_backend.pipeline import batches, trees
from torch_py_backend.pipeline.inputs import MAX_SETS, Inputs
from torch_py_backend.pipeline.padding import Placed
from torch_py_backend.pipeline.postprocessing import ROWS, Guarded
from torch_py_backend.pipeline.run import Entries, Gather, Gathered, Group, GroupStage
from torch_py_backend.signature.arguments import Signature
from torch_py_backend.signature.binding import InputBinding, bind_inputs
from torch_py_backend.values import Call, Item, Items, Parameters, RequestItem, Tree, Value

# The module of the model, or the function that is served instead.
Module: TypeAlias = "Callable[..., Tree]"
RowParameters: TypeAlias = "Sequence[Parameters]"
# The prefix of the names of unnamed results of preprocess().
_NUMBERED = "INPUT__"


def copy_rows(column: Value) -> Value:
    """Copy the results of rows that `HookedPipeline.split` returned, including their tensors."""
    return values.objects(map(trees.clone, column.tolist()))


class HookedPipeline:
    """The stages of a model with hooks.

    Attributes:
        inputs: checks the inputs of requests.
        by_row: whether `prepare` prepares the rows of a request.

    Raises:
        BindingError: the config's inputs do not match the signature of the hooks or the module.
    """

    def __init__(
        self, config: ModelConfig, signature: Signature, hooks: Hooks, device: torch.device
    ) -> None:
        self.hooks = hooks
        self._batched = config.max_batch_size > 0
        self._signature = signature
        self._device = device
        dtype = config.options.weights_dtype
        self._dtype = getattr(torch, dtype) if dtype else None
        # Names from hooks are argument names; names from the config may be bound in order.
        ordered = not (hooks.preprocess or hooks.preprocess_batch or hooks.collate)
        bind = partial(bind_inputs, signature=signature, ordered=ordered)
        self._bound = functools.lru_cache(MAX_SETS)(bind)
        self.by_row = hooks.preprocess is not None or hooks.collate is not None
        first, taken = hooks.preprocess or hooks.preprocess_batch, signature
        if first is not None:
            taken = hook_signature(config, first)
        elif self.by_row:
            taken = row_signature(config)
        self.inputs = Inputs(config, taken, by_row=self.by_row)
        self._group_inputs = self.inputs.stage(lambda binding: partial(self._rows, binding))

    def prepare(self, guarded: Guarded, entries: Entries) -> Entries:
        """Return the prepared rows of each request, or why it is refused."""
        entries, groups = self._group_inputs(entries)
        prepared = list(entries)
        for group in groups:
            columns, sizes = group.gather(group.items)
            binding, rows = group.call(*columns)
            for place, item, size in zip(group.places, group.items, sizes, strict=True):
                own = list(itertools.islice(rows, size))
                prepared[place] = guarded(item, self._prepare, item, binding, own)
        return prepared

    def _rows(
        self, binding: InputBinding, *columns: Tree
    ) -> tuple[InputBinding, Iterator[Sequence[Tree]]]:
        """Return the arguments of each row. Without a batch dimension a request is one row."""
        return binding, zip(*columns, strict=True) if self._batched else iter([columns])

    def _prepare(
        self,
        item: Item,
        binding: InputBinding,
        rows: list[Sequence[Tree]],
    ) -> Item:
        """Return the prepared rows of a request.

        Raises:
            BackendError: a row is refused, or the request has no rows.
        """
        if not rows:
            raise InputError("the request has no rows")
        hook, collate = self.hooks.preprocess, self.hooks.collate
        call: Call | None = hook
        if hook is not None and hook.takes_parameters:
            call = hook.with_parameters(values.parameters(item))
        prepared = []
        for row in rows:
            result: Tree
            if call is None:
                result = dict(zip(binding.names, row, strict=True))
            else:
                result = binding.call(call, row)
            # Before the next row: a hook may fill the same dict for each.
            prepared.append(_tensors(result) if collate is None else _copied(result))
        if collate is None and len(set(map(_key, prepared))) > 1:
            shapes = {name: list(part.shape) for name, part in prepared[0].items()}
            raise OutputError(
                f"preprocess() returned {shapes} and others for rows of one request",
                expected="the same names and shapes for each",
                cure="Or write collate(), which makes a batch of them.",
            )
        column: Item = {ROWS: values.objects(prepared)}
        return values.like(item, column) if isinstance(item, RequestItem) else column

    def _batch(self, rows: list[Tree], parameters: RowParameters) -> Tree:
        """Return the batch of prepared rows."""
        collate = self.hooks.collate
        if collate is not None:
            # A retry passes the same rows, and some functions remove entries of their rows.
            own = list(map(_copied, rows))
            return collate.with_parameters(parameters)(own)
        if not self._batched:
            return rows[0]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def stage(self, module: Module) -> GroupStage:
        """Return the stage that groups items, whose calls call the hooks for batches, too."""
        if self.by_row:
            return self._group_rows(module)
        caller = partial(partial, self._call_batch, module)
        return self.inputs.stage(caller, _with_parameters)

    def _group_rows(self, module: Module) -> GroupStage:
        """Return the stage that groups prepared items: all with collate(), else those alike."""
        gather = _with_parameters(_gather_rows)

        def call(column: Value, parameters: Value) -> Tree:
            sent = parameters.tolist()
            return self._call(module, self._batch(column.tolist(), sent), sent)

        def group(entries: Entries) -> tuple[Entries, Sequence[Group]]:
            groups: dict[Hashable, Placed] = {}
            for place, entry in enumerate(entries):
                if isinstance(entry, BackendError):
                    continue
                key: Hashable = place
                if self._batched:
                    first: Tree = entry[ROWS][0]
                    key = None if self.hooks.collate is not None else _key(first)
                groups.setdefault(key, []).append((place, entry))
            members = [zip(*group, strict=True) for group in groups.values()]
            return entries, [Group(gather, call, items, places) for places, items in members]

        return group

    def _call_batch(
        self,
        module: Module,
        binding: InputBinding,
        *columns: Tree,
    ) -> Tree:
        """Return the module's result for columns; the last one has the parameters of the rows."""
        *passed, column = columns
        parameters: RowParameters = column.tolist()
        if self.hooks.preprocess_batch is None:
            return self._call(module, dict(zip(binding.names, passed, strict=True)), parameters)
        hook = self.hooks.preprocess_batch.with_parameters(parameters)
        return self._call(module, binding.call(hook, passed), parameters)

    def _call(self, module: Module, prepared: Tree, parameters: RowParameters) -> Tree:
        """Return the module's result for a batch, after postprocess_batch() if there is one."""
        result = self._call_module(module, trees.to_device(prepared, self._device, self._dtype))
        if self.hooks.postprocess_batch is not None:
            result = self.hooks.postprocess_batch.with_parameters(parameters)(result)
        return result

    def _call_module(self, module: Module, batch: Tree) -> Tree:
        """Call the module with a dict of named arguments, a tuple of arguments, or one argument."""
        if isinstance(batch, dict | Mapping):
            named = {str(name): value for name, value in batch.items()}
        elif self._signature.leaves is None:
            return module(*batch) if isinstance(batch, tuple) else module(batch)
        else:
            parts = batch if isinstance(batch, tuple) else (batch,)
            named = {f"{_NUMBERED}{number}": value for number, value in enumerate(parts)}
        inputs = self._bound(tuple(named))  # hooks may pass only what a client has sent
        return inputs.call(module, [named[name] for name in inputs.names])

    def split(self, result: Tree, rows: int) -> list[Value]:
        """Split a batch's result into a column of results of rows.

        Raises:
            OutputError: a part of the result has another number of rows.
        """
        result = trees.to_device(result, torch.device("cpu"))
        parts = trees.split(result, rows) if self._batched else [result]
        return [values.objects(parts)]

    def run_unchecked(self, module: Module, item: Item) -> tuple[Tree, bool]:
        """Return the unchecked result of a request, and whether it is the result of one row.

        Raises:
            BackendError: a hook fails, or refuses the item.
        """
        entries: Entries = [item]
        if self.by_row:
            entries = self.prepare(lambda _, function, *args: function(*args), entries)
        (entry,), groups = self.stage(module)(entries)
        if isinstance(entry, BackendError):
            raise entry
        columns, _ = groups[0].gather(groups[0].items)
        result = groups[0].call(*columns)
        if self.hooks.postprocess is None:
            return result, False
        rows = columns[0].shape[0] if self._batched else 1
        (column,) = self.split(result, rows)
        return self.hooks.postprocess.with_parameters({})(column.tolist()[0]), True


def _gather_rows(items: Items) -> Gathered:
    columns = [item[ROWS] for item in items]
    return [batches.concatenate(columns)], list(map(len, columns))


def _with_parameters(gather: Gather) -> Gather:
    """Return what gathers items, with the parameters of each row in a column behind the others."""

    def gather_items(items: Items) -> Gathered:
        columns, sizes = gather(items)
        rows = [
            values.parameters(item)
            for item, size in zip(items, sizes, strict=True)
            for _ in range(size)
        ]
        return [*columns, values.objects(rows)], sizes

    return gather_items


def _tensors(row: Tree) -> dict[str, Tensor]:
    """Return the tensors of a row by name, or by number if they have no names."""
    if type(row) is dict and set(map(type, row.values())) == {Tensor}:
        return dict(row)
    if not isinstance(row, Mapping):
        parts = row if isinstance(row, tuple) else (row,)
        row = {f"{_NUMBERED}{number}": part for number, part in enumerate(parts)}
    return {str(name): _tensor(value) for name, value in row.items()}


def _tensor(value: Tree) -> Tensor:
    if isinstance(value, Tensor):  # as_tensor() would move it to torch's default device
        return value
    try:
        if isinstance(value, np.ndarray):  # torch takes no negative strides
            value = np.asarray(value, order="C")
        return torch.as_tensor(value)
    except Exception:  # an object of the user may raise any class
        raise OutputError(
            f"preprocess() returned {a_type(value)}, which cannot be batched",
            expected="a tensor or numbers; a tuple of these, or a dict by the names of forward()'s"
            " arguments",
            cure="Or write collate(), which makes a batch of anything.",
        ) from None


def _copied(row: Tree) -> Tree:
    """Copy a dict or a list, which may be changed or filled again."""
    return copy.copy(row) if isinstance(row, MutableMapping | list) else row


def _key(row: Mapping[str, Tensor]) -> Hashable:
    """Return what the rows of a batch have in common."""
    return tuple([(name, part.shape, part.dtype, part.device) for name, part in row.items()])
