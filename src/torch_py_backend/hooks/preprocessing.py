"""Preprocessing by hooks: row by row, or a whole batch at once."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend import composition
from torch_py_backend.batching import runtime, trees
from torch_py_backend.batching.gather_scatter import Item, Value, to_column
from torch_py_backend.batching.grouping import Group, Grouping, count_rows
from torch_py_backend.batching.runtime import Runtime
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
# Returns a row's result of preprocess(), or the refusal of the row.
Prepare: TypeAlias = "Callable[[], Tree]"


class BatchPreprocessor:
    """Batches the requests' inputs for preprocess_batch(), or for the module.

    Attributes:
        grouping: checks and groups the requests' items.

    Args:
        hook: preprocess_batch; None: the class does not define it.
    """

    def __init__(self, config: ModelConfig, hook: Hook | None, signature: Signature) -> None:
        self._hook = hook
        if hook is not None:
            signature = hook.signature()
            _check_annotations(config, signature)
        self.grouping = Grouping(config, signature)

    def begin(
        self,
        item: Item,
        _: Parameters,
        *,
        copies: bool = False,  # noqa: ARG002  the interface of `RowPreprocessor.begin`
    ) -> Callable[[], Item | InputError]:
        return partial(self.grouping.admit, item)

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


class _PreparedRow:
    """A prepared row for collate(), which may change it.

    Args:
        row: the result of preprocess().
        prepare: runs preprocess() once more, in this thread.
        calls_others: whether that calls other models.
    """

    __slots__ = ("_calls_others", "_is_used", "_prepare", "_row")

    def __init__(self, row: Tree, prepare: Prepare, *, calls_others: bool) -> None:
        self._row = row
        self._prepare = prepare
        self._calls_others = calls_others
        self._is_used = False

    def use(self) -> Tree:
        """Return the row. Prepare it again if a batch that failed has used it."""
        if self._is_used:
            self._row = self._prepare()
        elif self._calls_others:
            composition.count_call()  # a batch that uses the row must not be run again
        self._is_used = True
        return self._row

    def copy(self) -> Tree:
        """Return a copy of the row that `use` has just returned."""
        try:
            return copy.deepcopy(self._row)
        except Exception:  # of any class: preprocess() may return anything
            return self._prepare()


class RowPreprocessor:
    """Prepares each row of a request separately; collate() makes batches, or rows are stacked.

    Attributes:
        grouping: checks rows, each like a request of a model without a batch dimension.

    Args:
        hooks: without preprocess(), a row is a dict of its inputs; without collate(), rows with
            equal shapes share a batch.
        device_runtime: the device and the context for threads that prepare rows.
    """

    def __init__(self, config: ModelConfig, hooks: Hooks, device_runtime: Runtime) -> None:
        preprocess, collate = hooks.preprocess, hooks.collate
        self._model = config.name
        self._batched = config.max_batch_size > 0
        self._preprocess, self._collate = preprocess, collate
        self._axes = {spec.name: len(spec.dims) + 1 for spec in config.inputs}
        signature = by_name(config, of_row=True) if preprocess is None else preprocess.signature()
        if preprocess is not None:
            _check_annotations(config, signature)
        count = config.options.preprocess_threads
        enter = partial(runtime.make_current, device_runtime.device)
        self._threads = None if count is None else ThreadPoolExecutor(count, initializer=enter)
        self._guard = device_runtime.guard
        self.grouping = Grouping(dataclasses.replace(config, max_batch_size=0), signature)

    def begin(
        self, item: Item, parameters: Parameters, *, copies: bool = False
    ) -> Callable[[], Item | InputError]:
        count = count_rows(self._model, item, self._axes) if self._batched else 1
        if count == 0:
            count = InputError(self._model, "the request has no rows")
        if isinstance(count, InputError):
            refusal = count
            return lambda: refusal
        rows = [item]
        if self._batched:
            rows = [{name: value[row, ...] for name, value in item.items()} for row in range(count)]
        copies = (copies or count > 1) and self._preprocess is not None
        calls_before = composition.calls
        prepares = [partial(self._prepare_row, row, parameters, copies=copies) for row in rows]
        results: Sequence[Prepare] = prepares
        if self._threads is not None:
            # Context variables of this request, such as a trace's context, apply to its rows.
            results = [
                self._threads.submit(
                    contextvars.copy_context().run, self._run_guarded, prepare
                ).result
                for prepare in prepares
            ]
        return partial(self._join, results, prepares, calls_before)

    def _run_guarded(self, prepare: Prepare) -> Tree:
        with self._guard():  # thread-local
            return prepare()

    def _prepare_row(self, row: Item, parameters: Parameters, *, copies: bool) -> Tree:
        """Return the result of preprocess() for one row, or its refusal."""
        admitted = self.grouping.admit(row)
        if isinstance(admitted, InputError):
            return admitted
        ((inputs, _, _),) = self.grouping.group([(0, admitted)])
        columns = [to_column(admitted[name]) for name in inputs.names]
        call = dict if self._preprocess is None else self._preprocess.with_parameters(parameters)
        prepared = inputs.call(call, self.grouping.convert(inputs, columns))
        return trees.clone(prepared) if copies else prepared

    def _join(
        self, results: Sequence[Prepare], prepares: Sequence[Prepare], calls_before: int
    ) -> Item | InputError:
        """Return the item of a request's rows, or the refusal of one of them."""
        rows = [result() for result in results]
        refusal = next((row for row in rows if isinstance(row, InputError)), None)
        if refusal is not None:
            return refusal
        if self._collate is not None:
            calls_others = composition.calls != calls_before
            kept = map(partial(_PreparedRow, calls_others=calls_others), rows, prepares)
            return {ROWS: request_parameters.column(kept)}
        tensors = [self._tensors(row) for row in rows]
        if not self._batched:
            return {**tensors[0]}
        if len(rows) == 1:
            return {name: tensor.unsqueeze(0) for name, tensor in tensors[0].items()}
        try:
            return {name: torch.stack([row[name] for row in tensors]) for name in tensors[0]}
        except (RuntimeError, LookupError):
            shapes = {name: list(tensor.shape) for name, tensor in tensors[0].items()}
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
            key = str(name)
            try:
                # torch takes no negative strides.
                part = np.asarray(value, order="C") if isinstance(value, np.ndarray) else value
                # as_tensor() would move a tensor to torch's default device.
                tensors[key] = part if isinstance(part, Tensor) else torch.as_tensor(part)
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
                # Inputs that are known only by their names.
                InputBinding(
                    tuple(members[0][1]),
                    (ArgumentType.TENSOR,) * len(members[0][1]),
                    lambda *_: None,
                ),
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
            (column,) = columns
            rows: list[Tree] = []
            last: _PreparedRow | None = None
            prepared: list[_PreparedRow] = request_parameters.values(column)
            for row in prepared:
                # A batch is filled up with its last row, which collate() gets as copies.
                rows.append(row.copy() if row is last else row.use())
                last = row
            return self._collate.with_parameters(parameters)(rows)
        if not inputs.names or not inputs.names[0].startswith(NUMBERED):
            return dict(zip(inputs.names, columns, strict=True))
        return columns[0] if len(columns) == 1 else tuple(columns)


def by_name(config: ModelConfig, *, of_row: bool) -> Signature:
    """Return the signature of a function that takes each input by its name."""
    arguments = []
    for spec in config.inputs:
        takes = ArgumentType.TENSOR
        if spec.dtype.torch is None:
            takes = ArgumentType.RAW if of_row and spec.dims in ((), (1,)) else ArgumentType.BYTES
        arguments.append(Argument(spec.name, not spec.optional, Passing.KEYWORD, takes, spec.name))
    return Signature(tuple(arguments), name="collate" if of_row else "inference")


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
