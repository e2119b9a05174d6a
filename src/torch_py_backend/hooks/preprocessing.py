"""What hooks make of the inputs: rows prepared one by one, or a batch of them at once."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torch_py_backend.batching import trees
from torch_py_backend.batching.gather_scatter import Item, Value, to_column
from torch_py_backend.batching.grouping import Group, Intake, count_rows
from torch_py_backend.batching.runtime import Guard
from torch_py_backend.config import request_parameters
from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.config.request_parameters import Parameters
from torch_py_backend.errors import BindingError, InputError, OutputError
from torch_py_backend.hooks.user_hooks import Hooks, Stage
from torch_py_backend.signature.binding import (
    Argument,
    Inputs,
    Passing,
    Signature,
    Takes,
    bind_inputs,
)

# What an item holds between preprocess() and collate().
ROWS = "rows"
# The names of what preprocess() returns without any.
NUMBERED = "INPUT__"

Told: TypeAlias = "Sequence[Parameters]"


class ByBatch:
    """What requests bring is batched as it is: preprocess_batch() takes it, or the module.

    Args:
        config: the model's config.
        stage: preprocess_batch; None: there is none.
        signature: what the module takes.
    """

    def __init__(self, config: ModelConfig, stage: Stage | None, signature: Signature) -> None:
        self._stage = stage
        if stage is not None:
            signature = stage.signature()
            _refuse_vague(config, signature)
        self._intake = Intake(config, signature)
        self.places = self._intake.places
        self.patterns = self._intake.patterns

    def begin(
        self,
        item: Item,
        _: Parameters,
        *,
        more: bool = False,  # noqa: ARG002  as `ByRow.begin`
    ) -> Callable[[], Item | InputError]:
        return partial(self._intake.admit, item)

    def group(self, items: Sequence[tuple[int, Item]]) -> list[Group]:
        return self._intake.group(items)

    def batch(self, inputs: Inputs, columns: Sequence[Value], told: Told) -> Any:
        """What the module is called with."""
        passed = self._intake.convert(inputs, columns)
        if self._stage is None:
            return dict(zip(inputs.names, passed, strict=True))
        return inputs.call(self._stage.told(told), passed)


class _Begun(NamedTuple):
    """A row that is being prepared.

    Attributes:
        ended: gives what preprocess() made: a thread has begun with it, or it begins then.
        again: prepares it once more, in this thread.
    """

    ended: Callable[[], Any]
    again: Callable[[], Any]


class _Prepared:
    """What preprocess() made of a row, for collate(), which may change what it is given.

    Args:
        row: what it made.
        again: makes it once more.
    """

    __slots__ = ("_again", "_given", "_row")

    def __init__(self, row: Any, again: Callable[[], Any]) -> None:
        self._row = row
        self._again = again
        self._given = False

    def take(self) -> Any:
        """The row; prepared anew, where collate() has had it: parts of its batch are run again."""
        if self._given:
            self._row = self._again()
        self._given = True
        return self._row

    def copied(self) -> Any:
        """The row once more, which `take` has just given."""
        try:
            return copy.deepcopy(self._row)
        except Exception:  # of whatever preprocess() returns
            return self._again()


class ByRow:
    """Each row of a request is prepared by itself; collate() makes batches, or rows are stacked.

    Args:
        config: the model's config.
        hooks: without preprocess(), a row is a dict of its inputs; without collate(), rows whose
            tensors have one shape share a batch.
        guard: entered by threads that prepare rows.
    """

    def __init__(self, config: ModelConfig, hooks: Hooks, guard: Guard) -> None:
        preprocess, collate = hooks.preprocess, hooks.collate
        self._model = config.name
        self._batched = config.max_batch_size > 0
        self._preprocess, self._collate = preprocess, collate
        self._axes = {spec.name: len(spec.dims) + 1 for spec in config.inputs}
        signature = by_name(config, of_row=True) if preprocess is None else preprocess.signature()
        if preprocess is not None:
            _refuse_vague(config, signature)
        wished = config.options.preprocess_threads
        self._threads = ThreadPoolExecutor(wished) if wished is not None else None
        self._guard = guard
        # A row is taken in as a request is that has no batch dimension.
        self._intake = Intake(dataclasses.replace(config, max_batch_size=0), signature)
        self.places = self._intake.places
        self.patterns = self._intake.patterns

    def begin(
        self, item: Item, told: Parameters, *, more: bool = False
    ) -> Callable[[], Item | InputError]:
        if not self._batched:
            return partial(self._whole, [self._begun(item, told, more=more)])
        count = count_rows(self._model, item, self._axes)
        if count == 0:
            count = InputError(self._model, "the request has no rows")
        if isinstance(count, InputError):
            refusal = count
            return lambda: refusal
        rows = [
            self._begun(
                {name: value[row, ...] for name, value in item.items()},
                told,
                more=more or count > 1,
            )
            for row in range(count)
        ]
        return partial(self._whole, rows)

    def _begun(self, row: Item, told: Parameters, *, more: bool) -> _Begun:
        prepare = partial(self._row, row, told)
        if more and self._preprocess is not None:
            prepare = partial(_owned, prepare)
        if self._threads is None:
            return _Begun(prepare, prepare)
        # What is current for this request, a trace's context say, is so for its rows.
        current = contextvars.copy_context()
        return _Begun(self._threads.submit(current.run, self._guarded, prepare).result, prepare)

    def _guarded(self, prepare: Callable[[], Any]) -> Any:
        with self._guard():  # of this thread
            return prepare()

    def _whole(self, begun: Sequence[_Begun]) -> Item | InputError:
        """The request of these rows."""
        rows = [one.ended() for one in begun]
        refused = next((one for one in rows if isinstance(one, InputError)), None)
        if refused is not None:
            return refused
        if self._collate is None:
            return self._stack(rows)
        made = (_Prepared(row, one.again) for row, one in zip(rows, begun, strict=True))
        return {ROWS: request_parameters.column(made)}

    def _row(self, row: Item, told: Parameters) -> Any:
        """What becomes of one row, or why it is refused."""
        admitted = self._intake.admit(row)
        if isinstance(admitted, InputError):
            return admitted
        ((inputs, _, _),) = self._intake.group([(0, admitted)])
        columns = [to_column(admitted[name]) for name in inputs.names]
        call = dict if self._preprocess is None else self._preprocess.told(told)
        return inputs.call(call, self._intake.convert(inputs, columns))

    def _stack(self, rows: Sequence[Any]) -> Item:
        """One request's rows as what the module takes of it."""
        tensors = [self._tensors(row) for row in rows]
        if not self._batched:
            return {**tensors[0]}
        if len(rows) == 1:
            return {name: one.unsqueeze(0) for name, one in tensors[0].items()}
        try:
            return {name: torch.stack([row[name] for row in tensors]) for name in tensors[0]}
        except (RuntimeError, LookupError):
            shapes = [{name: list(one.shape) for name, one in row.items()} for row in tensors]
            raise OutputError(
                self._model,
                f"preprocess() returned {shapes[0]} and others for rows of one request",
                expected="the same names and shapes for each",
                cure="Or write collate(), which makes a batch of them.",
            ) from None

    def _tensors(self, row: Any) -> dict[str, Tensor]:
        """What preprocess() returned, by the names of forward()'s arguments, or by numbers."""
        if isinstance(row, Mapping):
            return {str(name): self._tensor(value) for name, value in row.items()}
        parts = row if isinstance(row, tuple) else (row,)
        return {f"{NUMBERED}{number}": self._tensor(one) for number, one in enumerate(parts)}

    def _tensor(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value
        try:
            return torch.as_tensor(value)
        except Exception:  # whatever it is
            raise OutputError(
                self._model,
                f"preprocess() returned a {type(value).__name__}, of which no batch can be made",
                expected="a tensor or numbers; a tuple of these, or a dict by the names of"
                " forward()'s arguments",
                cure="Or write collate(), which makes a batch of anything.",
            ) from None

    def group(self, items: Sequence[tuple[int, Item]]) -> list[Group]:
        """Items that can share a batch."""
        groups: dict[Any, list[tuple[int, Item]]] = {}
        for position, item in items:
            groups.setdefault(self._key(position, item), []).append((position, item))
        return [
            Group(_columns(found[0][1]), [item for _, item in found], [at for at, _ in found])
            for found in groups.values()
        ]

    def _key(self, position: int, item: Item) -> Any:
        if not self._batched:
            return position
        if self._collate is not None:
            return None
        return tuple(
            (name, one.shape[1:], one.dtype, one.device)
            for name, one in item.items()
            if isinstance(one, Tensor)
        )

    def batch(self, inputs: Inputs, columns: Sequence[Value], told: Told) -> Any:
        """What the module is called with."""
        if self._collate is not None:
            (held,) = columns
            return self._collate.told(told)(_distinct(request_parameters.values(held)))
        if not inputs.names or not inputs.names[0].startswith(NUMBERED):
            return dict(zip(inputs.names, columns, strict=True))
        return columns[0] if len(columns) == 1 else tuple(columns)


def _owned(prepare: Callable[[], Any]) -> Any:
    return trees.owned(prepare())


def _distinct(prepared: Sequence[_Prepared]) -> list[Any]:
    """The rows of a batch; those that fill it up repeat the last one, and are copies."""
    rows, last = [], None
    for one in prepared:
        rows.append(one.copied() if one is last else one.take())
        last = one
    return rows


def _columns(item: Item) -> Inputs:
    """Columns that are known by their names only."""
    return Inputs(tuple(item), (Takes.TENSOR,) * len(item), lambda *_: None)


def by_name(config: ModelConfig, *, of_row: bool) -> Signature:
    """What takes each input by its name: as a dict has it."""
    arguments = (_keyword(spec, of_row=of_row) for spec in config.inputs)
    return Signature(tuple(arguments), name="collate" if of_row else "inference")


def _keyword(spec: TensorSpec, *, of_row: bool) -> Argument:
    takes = Takes.TENSOR
    if spec.dtype.torch is None:
        takes = Takes.RAW if of_row and spec.dims in ((), (1,)) else Takes.BYTES
    return Argument(spec.name, not spec.optional, Passing.KEYWORD, takes, spec.name)


def _refuse_vague(config: ModelConfig, signature: Signature) -> None:
    """Strings that are not said to be bytes or text; one value, where all rows' values come."""
    names = [spec.name for spec in config.inputs]
    strings = {spec.name for spec in config.inputs if spec.dtype.torch is None}
    inputs = bind_inputs(config.name, names, signature)
    for name, takes in zip(inputs.names, inputs.takes, strict=True):
        if name in strings and takes is Takes.TENSOR:
            raise BindingError(
                config.name,
                f"input '{name}' is BYTES, and {signature} does not say what it takes",
                expected="an annotation: bytes or str for one a row, list[bytes] or list[str]",
            )
        if takes.scalar and signature.name == "preprocess_batch":
            raise BindingError(
                config.name,
                f"{signature} takes {takes.value} for the input '{name}', and gets all rows'",
                expected="a Tensor, list[str] or list[bytes]",
                cure="Or name it preprocess, which is called for each row.",
            )
