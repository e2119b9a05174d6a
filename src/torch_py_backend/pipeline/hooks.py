"""The stages of a model with hooks: prepare rows, make batches, call the module, split its result.

A prepared item has one column, ROWS, of what preprocess() returned for each row. collate() makes a
batch of prepared rows, or rows of equal shapes are stacked.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Hashable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import repeat

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_py_backend import values
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import (
    BackendError,
    BindingError,
    InputError,
    OutputError,
    a_type,
    counted,
    summarize,
)
from torch_py_backend.loading.hooks import Hooks
from torch_py_backend.pipeline import batches
from torch_py_backend.pipeline.inputs import MAX_SETS, Inputs
from torch_py_backend.pipeline.outputs import extractor
from torch_py_backend.pipeline.run import (
    Entries,
    Gather,
    Gathered,
    Group,
    Grouped,
    GroupStage,
    Results,
)
from torch_py_backend.signature.arguments import ArgumentType, Signature
from torch_py_backend.signature.binding import InputBinding, bind_inputs
from torch_py_backend.values import Call, Item, Items, Parameters, Tree, Value

# The only column of prepared items, and of results before postprocess(): one value a row.
ROWS = "rows"


class HookedPipeline:
    """The stages of a model with hooks; BindingError if the config does not match a signature.

    Attributes:
        inputs: checks the inputs of requests.
        by_row: whether `prepare` prepares the rows of a request.
    """

    def __init__(
        self,
        config: ModelConfig,
        signature: Signature,
        hooks: Hooks,
        device: torch.device,
    ) -> None:
        self.hooks = hooks
        self._batched = config.max_batch_size > 0
        self._device = device
        dtype = config.options.weights_dtype
        self._dtype = getattr(torch, dtype) if dtype else None
        bind = partial(bind_inputs, signature=signature, ordered=False)
        self._bound = functools.lru_cache(MAX_SETS)(bind)
        self._takes_parameters = any(hook.takes_parameters for hook in hooks.per_batch)
        self._specs = {spec.name: spec for spec in config.outputs}
        row_config = dataclasses.replace(config, max_batch_size=0)
        self._extract = extractor(row_config, "postprocess()")  # the outputs of a row
        self.by_row = hooks.preprocess is not None
        first = hooks.preprocess or hooks.preprocess_batch
        if first is None:
            self.inputs = Inputs(config, signature, cast=dtype)
            return
        self.inputs = Inputs(config, first.signature, by_row=self.by_row)
        # Its calls return how the arguments of rows are passed, and these.
        self._group_inputs = self.inputs.stage(lambda binding: lambda *parts: (binding, parts))
        binding = self.inputs.binding
        types = dict(zip(binding.names, binding.types, strict=True))
        for spec in config.inputs:
            if spec.dtype.torch is None and types[spec.name] is ArgumentType.TENSOR:
                raise BindingError(
                    f"input '{spec.name}' is BYTES, and {first.signature} has no annotation for it",
                    expected="an annotation: bytes or str for one a row, list[bytes] or list[str]",
                )

    def prepare(self, guarded: Call, entries: Entries) -> Entries:
        """Return the prepared rows of each request, or why it is refused."""
        entries, groups = self._group_inputs(entries)
        prepared = list(entries)
        for group in groups:
            for place, item in zip(group.places, group.items, strict=True):
                prepared[place] = guarded(item, self._prepare, item, group)
        return prepared

    def _prepare(self, item: Item, group: Group) -> Item:
        """Return the prepared rows of a request; BackendError if there are none, or one fails."""
        columns, _ = group.gather([item])
        binding, parts = group.call(*columns)
        # Without a batch dimension, a request is one row.
        rows = list(zip(*parts, strict=True)) if self._batched else [parts]
        if not rows:
            raise InputError("the request has no rows")
        hook, stacked = self.hooks.preprocess, self.hooks.collate is None
        call = hook.with_parameters(values.parameters(item))  # type: ignore[union-attr]
        prepared: list[Tree] = []
        for row in rows:
            result = binding.call(call, row)
            # Before the next row: a hook may fill the same dict for each.
            prepared.append(_tensors(result) if stacked else _copied(result))
        if stacked and len(rows) > 1 and len(set(map(_key, prepared))) > 1:
            raise OutputError(
                "preprocess() returned other names or shapes for other rows of one request",
                expected="the same for each",
                cure="Pad them in preprocess_batch(), or make a batch of them in collate().",
            )
        return item | {ROWS: values.objects(prepared)}

    def stage(self, module: Call) -> GroupStage:
        """Return the stage that groups items, or prepared items, for calls of the module."""
        stage: GroupStage
        if self.by_row:
            stage = partial(self._group_rows, partial(self._call, module, None))
        else:
            stage = self.inputs.stage(lambda binding: partial(self._call, module, binding))
        return partial(_with_parameters, stage) if self._takes_parameters else stage

    def _group_rows(self, call: Call, entries: Entries) -> Grouped:
        """Group prepared items: all with collate(), else those alike."""

        def keys_of(items: Items) -> Iterable[Hashable]:
            if not self._batched:
                return range(len(items))
            if self.hooks.collate is not None:
                return repeat(None, len(items))
            firsts: list[Tree] = [item[ROWS][0] for item in items]
            return map(_key, firsts)

        groups = batches.grouped(entries, keys_of)
        return entries, [Group(_gather_rows, call, items, places) for places, items in groups]

    def _call(
        self,
        module: Call,
        binding: InputBinding | None,
        *columns: Value,
    ) -> Tree:
        """Return the result for columns of inputs; without a binding, for a column of rows."""
        hooks = self.hooks
        parameters: Sequence[Parameters] = ()
        if self._takes_parameters:
            columns, parameters = columns[:-1], columns[-1].tolist()
        if binding is None:
            rows = columns[0].tolist()
            prepared = rows[0]
            if hooks.collate is not None:
                prepared = hooks.collate.with_parameters(parameters)(list(map(_copied, rows)))
            elif self._batched:
                prepared = {name: torch.stack([row[name] for row in rows]) for name in prepared}
            result = self._call_module(module, prepared)
        elif hooks.preprocess_batch is not None:
            hook = hooks.preprocess_batch.with_parameters(parameters)
            result = self._call_module(module, binding.call(hook, columns))
        else:
            result = binding.call(module, columns)
        if hooks.postprocess_batch is not None:
            result = hooks.postprocess_batch.with_parameters(parameters)(result)
        return result

    def _call_module(self, module: Call, prepared: Tree) -> Tree:
        """Call the module with a dict of named arguments, a tuple of arguments, or one argument."""
        move = partial(to_device, device=self._device, dtype=self._dtype)
        if not isinstance(prepared, Mapping):
            parts = prepared if isinstance(prepared, tuple) else (prepared,)
            return module(*map(move, parts))
        named = {str(name): move(part) for name, part in prepared.items()}
        inputs = self._bound(tuple(named))  # hooks may pass only what a client has sent
        return inputs.call(module, [named[name] for name in inputs.names])

    def split(self, result: Tree, rows: int) -> list[Value]:
        """Split a batch's result into a column of results of rows."""
        parts = [to_device(result, torch.device("cpu"))]
        if self._batched:
            parts = split(parts[0], rows)
        return [values.objects(parts)]

    def finish(
        self,
        guarded: Call,
        results: Results,
        entries: Entries,
    ) -> Results:
        """Return the outputs of each request from the results of its rows; or its error."""
        return [
            result
            if isinstance(result, BackendError)
            else guarded(entry, self._outputs, result[ROWS], entry)
            for result, entry in zip(results, entries, strict=True)
        ]

    def _outputs(self, rows: Value, item: Item) -> Item:
        """Return the outputs of a request; raise OutputError if its rows differ in shape."""
        hook = self.hooks.postprocess
        postprocess = hook.with_parameters(values.parameters(item))  # type: ignore[union-attr]
        parts = [self._extract(self._converted(postprocess(row)), 1) for row in rows.tolist()]
        outputs: Item = {}
        for name, column in zip(self._specs, zip(*parts, strict=True), strict=True):
            stack: Call = torch.stack if isinstance(column[0], Tensor) else np.stack
            try:
                outputs[name] = stack(column) if self._batched else column[0]
            except (RuntimeError, ValueError):
                raise OutputError(
                    f"postprocess() gives output '{name}' other shapes for other rows of a request",
                    expected="one shape for all",
                ) from None
        return outputs

    def _converted(self, result: Tree) -> Tree:
        """Convert lists and numbers in the result of postprocess() to the types of the outputs."""
        if isinstance(result, Mapping):
            return {name: self._convert(name, part) for name, part in result.items()}
        if len(self._specs) == 1 and not isinstance(result, tuple):
            return self._convert(next(iter(self._specs)), result)
        return result

    def _convert(self, name: str, part: Tree) -> Tree:
        """Convert a list or a number to the output's type without loss."""
        if isinstance(part, np.generic):
            part = part.item()
        if name not in self._specs or not isinstance(part, list | tuple | int | float):
            return part
        spec = self._specs[name]
        if spec.dtype.torch is None:
            return np.array(part, dtype=np.object_)
        dtype: torch.dtype = getattr(torch, spec.dtype.torch)
        try:
            tensor = torch.as_tensor(part)
            converted = torch.tensor(part, dtype=dtype)
        except Exception as error:  # tensors, strings, ragged lists, numbers that are too large
            raise OutputError(
                f"postprocess() gives {a_type(part)} for output '{name}': {summarize(error)}",
                expected=str(spec),
            ) from None
        if dtype.is_floating_point or torch.equal(converted.to(tensor.dtype), tensor):
            return converted
        return tensor  # of another type, which the extractor refuses: torch makes 255 of -1

    def run_unchecked(self, module: Call, item: Item) -> Tree:
        """Return the unchecked result of a request; with postprocess(), that of its first row."""
        entries: Entries = [item]
        if self.by_row:
            entries = self.prepare(lambda _, function, *args: function(*args), entries)
        (entry,), groups = self.stage(module)(entries)
        if isinstance(entry, BackendError):
            raise entry
        columns, (rows,) = groups[0].gather(groups[0].items)
        result = groups[0].call(*columns)
        if self.hooks.postprocess is None:
            return result
        (column,) = self.split(result, rows)
        return self.hooks.postprocess.with_parameters({})(column[0])


def _with_parameters(stage: GroupStage, entries: Entries) -> Grouped:
    """Group entries; the parameters of each row are a column behind the others."""

    def gather_items(gather: Gather, items: Items) -> Gathered:
        columns, sizes = gather(items)
        sent = zip(map(values.parameters, items), sizes, strict=True)
        rows = [parameters for parameters, size in sent for _ in range(size)]
        return [*columns, values.objects(rows)], sizes

    entries, groups = stage(entries)
    return entries, [group._replace(gather=partial(gather_items, group.gather)) for group in groups]


def _gather_rows(items: Items) -> Gathered:
    columns = [item[ROWS] for item in items]
    return [batches.concatenate(columns)], list(map(len, columns))


def _tensors(row: Tree) -> Mapping[str, Tensor]:
    """Return the tensors of a row by name, or by number if they have no names."""
    try:
        named = row
        if not isinstance(row, Mapping):
            parts = row if isinstance(row, tuple) else (row,)
            named = {f"INPUT__{number}": part for number, part in enumerate(parts)}
        return {
            # as_tensor() would move a tensor to torch's default device.
            str(name): part if isinstance(part, Tensor) else torch.as_tensor(part)
            for name, part in named.items()
        }
    except Exception as error:  # an object of the user may raise any class
        raise OutputError(
            f"preprocess() returned {a_type(row)}, which cannot be batched: {summarize(error)}",
            expected="a tensor or numbers; a tuple of these, or a dict by the names of forward()'s"
            " arguments",
            cure="Or write collate(), which makes a batch of anything.",
        ) from None


def _copied(row: Tree) -> Tree:
    """Copy a dict or a list, which a hook may fill again, and collate() may change."""
    return copy.copy(row) if isinstance(row, MutableMapping | list) else row


def _key(row: Mapping[str, Tensor]) -> Hashable:
    """Return what the rows of a batch have in common."""
    return tuple([(name, part.shape, part.dtype) for name, part in row.items()])


def to_device(
    tree: Tree,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tree:
    """Move the tensors of a tree to a device, and convert floating-point ones to a type, if any."""

    def move(part: Tensor) -> Tensor:
        return part.to(device, dtype if part.is_floating_point() else None)

    if isinstance(tree, Tensor):
        return move(tree)
    return pytree.tree_map_only(Tensor, move, tree)


def split(result: Tree, rows: int) -> list[Tree]:
    """Split a result by rows: tensors into slices, lists into entries, in tuples and dicts, too.

    Anything else is repeated, but a dataclass, whose tensors are not found.
    """
    leaves, structure = pytree.tree_flatten(result, lambda part: isinstance(part, list))
    columns = []
    for leaf in leaves:
        has_rows = isinstance(leaf, list)
        if isinstance(leaf, Tensor | np.ndarray):
            has_rows = leaf.ndim > 0
        if dataclasses.is_dataclass(leaf) or (has_rows and len(leaf) != rows):
            size = f" of length {len(leaf)}" if has_rows else ""
            raise OutputError(
                f"the result for {counted(rows, 'row')} holds {a_type(leaf)}{size}, which"
                " cannot be split by rows for postprocess()",
                expected="tensors whose dimension 0 is the batch, and lists with an entry a row",
                cure="Or write postprocess_batch(), which receives the unchanged result.",
            )
        columns.append(list(leaf) if has_rows else [leaf] * rows)
    if structure.is_leaf():
        return columns[0]
    return [
        pytree.tree_unflatten([column[row] for column in columns], structure) for row in range(rows)
    ]


def copy_rows(column: Value) -> Value:
    """Copy the results of rows that `HookedPipeline.split` returned, including their tensors."""
    clone = partial(pytree.tree_map_only, Tensor, torch.clone)
    return values.objects(map(clone, column.tolist()))
