"""What hooks do around a module: rows prepared, batches made and passed, results read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torch_py_backend import batching, parameters
from torch_py_backend.batching import Item, Value, to_column
from torch_py_backend.binding import (
    Argument,
    Inputs,
    Passing,
    Signature,
    Takes,
    bind_inputs,
    is_path,
    ordinal,
)
from torch_py_backend.config import ModelConfig, TensorSpec
from torch_py_backend.errors import BindingError, InputError, OutputError, brief, shown
from torch_py_backend.hooks import Hooks, Stage
from torch_py_backend.intake import Group, Intake, count_rows
from torch_py_backend.outputs import Finite, Taker
from torch_py_backend.parameters import Parameters
from torch_py_backend.runtime import Guard, Runtime

# What an item holds between preprocess() and collate(), and an outcome before postprocess().
_ROWS = "rows"
UNREAD = (_ROWS,)
# The names of what preprocess() returns without any.
_NUMBERED = "INPUT__"

_Told: TypeAlias = "Sequence[Parameters]"


class Stages:
    """The stages before and after the engine's own, for a model with hooks.

    It stands where `Intake` stands for a model without: items go through `begin`, are grouped,
    and each group knows how the module is called with it.

    Args:
        config: the model's config.
        signature: what the module takes.
        hooks: the model's hooks.
        surroundings: where the module is, and what calls of it are made in.

    Raises:
        BindingError: the config's inputs are not what the hooks, or the module, take.
    """

    def __init__(
        self, config: ModelConfig, signature: Signature, hooks: Hooks, surroundings: Runtime
    ) -> None:
        self.hooks = hooks
        self._model = config.name
        self._batched = config.max_batch_size > 0
        self._signature = signature
        self._device = surroundings.device
        self._intake: _Whole | _Rows
        if hooks.preprocess is None and hooks.collate is None:
            # inference() has the inputs by their names; what the module takes is its affair.
            taken = signature if hooks.inference is None else _by_name(config, of_row=False)
            self._intake = _Whole(config, hooks.preprocess_batch, taken)
        else:
            self._intake = _Rows(config, hooks, surroundings.guard)
        self.places = self._intake.places
        self.patterns = self._intake.patterns
        # Parameters go with the rows to who asks for them after preprocess().
        self._carries = any(one.asks for one in hooks.stages if one.name != "preprocess")
        self._bound: dict[tuple[str, ...], Inputs] = {}
        alone = dataclasses.replace(config, max_batch_size=0)
        self._specs = {spec.name: spec for spec in config.outputs}
        self._taker = Taker(alone, "postprocess()")
        self._names = tuple(self._specs)
        self._finite = Finite(config) if config.options.check_finite else None

    # --- before the module ---------------------------------------------------------------------

    def begin(self, item: Item) -> Callable[[], Item | InputError]:
        """Begin to prepare a request's item; what is returned ends it.

        That gives what batches are made of, or raises what a hook fails with.
        """
        item = dict(item)
        told = parameters.taken(item)
        return partial(self._prepared, self._intake.begin(item, told), told)

    def _prepared(
        self, prepare: Callable[[], Item | InputError], told: Parameters
    ) -> Item | InputError:
        made = prepare()
        if isinstance(made, InputError) or not self._carries:
            return made
        first = next(iter(made.values()), None)
        rows = first.shape[0] if self._batched and first is not None else 1
        return {**made, parameters.KEY: parameters.column([told] * rows)}

    def group(self, items: Sequence[tuple[int, Item]]) -> list[Group]:
        """Items that can share a call."""
        whole = dict(items)
        bare = [
            (at, {name: value for name, value in item.items() if name != parameters.KEY})
            for at, item in items
        ]
        return [
            Group(self._passed(inputs), [whole[at] for at in positions], positions)
            for inputs, _, positions in self._intake.group(bare)
        ]

    def _passed(self, inputs: Inputs) -> Inputs:
        """How columns are passed, those of the parameters among them."""
        extra = (parameters.KEY,) if self._carries else ()
        return Inputs(
            (*inputs.names, *extra),
            (*inputs.takes, *(Takes.TENSOR for _ in extra)),
            partial(self._call, inputs),
            inputs.places,
        )

    def convert(self, _: Inputs, columns: Sequence[Value]) -> Sequence[Value]:
        """Columns as a group's call takes them: as they are."""
        return columns

    # --- the module ----------------------------------------------------------------------------

    def _call(self, inputs: Inputs, module: Any, columns: Sequence[Any]) -> Any:
        """What is made of a batch: the module's result, or what postprocess_batch() reads in it."""
        told: _Told = ()
        if self._carries:
            *columns, held = columns
            told = parameters.values(held)
        batch = _sent(self._intake.batch(inputs, columns, told), self._device)
        if self.hooks.inference is not None:
            result = self.hooks.inference.told(told)(module, batch)
        else:
            result = self._pass(module, batch)
        if self.hooks.postprocess_batch is not None:
            result = self.hooks.postprocess_batch.told(told)(result)
        return result

    def _pass(self, module: Any, batch: Any) -> Any:
        """The module's result: a dict is its arguments by name, a tuple several, else the one."""
        if isinstance(batch, Mapping):
            named = {str(name): value for name, value in batch.items()}
        elif self._signature.leaves is None:
            return module(*batch) if isinstance(batch, tuple) else module(batch)
        else:
            parts = batch if isinstance(batch, tuple) else (batch,)
            named = {f"{_NUMBERED}{number}": value for number, value in enumerate(parts)}
        names = tuple(named)
        inputs = self._bound.get(names)
        if inputs is None:
            # Names of the config may be anything; those that hooks give are meant.
            made = self.hooks.makes_batches
            inputs = bind_inputs(self._model, names, self._signature, ordered=not made)
            self._bound[names] = inputs
        return inputs.call(module, [named[name] for name in inputs.names])

    # --- after the module ----------------------------------------------------------------------

    def split(self, result: Any, rows: int) -> list[Value]:
        """A batch's result as a column with what each row has of it.

        Raises:
            OutputError: a part of it does not have as many rows.
        """
        result = _sent(result, torch.device("cpu"))
        parts = _split(self._model, result, rows) if self._batched else [result]
        return [parameters.column(parts)]

    @property
    def finishes(self) -> bool:
        """Whether outcomes are what `split` made, and `finish` makes outputs of them."""
        return self.hooks.postprocess is not None

    def finish(self, outcome: Mapping[str, Value], item: Item) -> dict[str, Value]:
        """One request's outputs, read by postprocess() from the results of its rows.

        Raises:
            BackendError: postprocess() fails, or returns what the config contradicts.
        """
        results = parameters.values(outcome[_ROWS])
        told = parameters.values(item[parameters.KEY]) if self._carries else [()] * len(results)
        rows = [
            self._taker.take(self._arranged(self._read(*one)), 1)
            for one in zip(results, told, strict=True)
        ]
        columns = list(zip(*rows, strict=True))
        made = {
            name: self._stacked(name, column) if self._batched else column[0]
            for name, column in zip(self._names, columns, strict=True)
        }
        refusal = self._finite.refusal(made) if self._finite is not None else None
        if refusal is not None:
            raise refusal
        return made

    def _read(self, result: Any, told: Any) -> Any:
        assert self.hooks.postprocess is not None  # noqa: S101  nobody else finishes
        return self.hooks.postprocess.told(told)(result)

    def _arranged(self, made: Any) -> Any:
        """What postprocess() returned, with lists and arrays as the outputs that they are."""
        if isinstance(made, Mapping):
            self._refuse_strangers(made)
            return {name: self._part(self._specs.get(name), one) for name, one in made.items()}
        if len(self._specs) == 1 and not isinstance(made, tuple):
            (spec,) = self._specs.values()
            return self._part(spec, made)
        return made

    def _refuse_strangers(self, made: Mapping[Any, Any]) -> None:
        """A dict without a single output: its order is not meant."""
        named = not any(is_path(name) or ordinal(name) is not None for name in self._names)
        if named and self._specs and made.keys().isdisjoint(self._specs):
            raise OutputError(
                self._model,
                f"postprocess() returned a dict with {shown(map(str, made)) or 'nothing'}",
                expected=f"the outputs {', '.join(self._names)}",
            )

    def _part(self, spec: TensorSpec | None, part: Any) -> Any:
        if spec is None or isinstance(part, Tensor | str | bytes):
            return part
        if isinstance(part, np.ndarray) and part.dtype.kind not in "OUS":
            return torch.from_numpy(part)
        if not isinstance(part, list | tuple):
            return part
        if spec.dtype.torch is None:
            return np.array(part, dtype=np.object_)
        return self._numbers(spec, part)

    def _numbers(self, spec: TensorSpec, part: Sequence[Any]) -> Tensor:
        """Numbers in the output's type, which must be able to hold them."""
        dtype: torch.dtype = getattr(torch, spec.dtype.torch or "")
        try:
            found = torch.as_tensor(part)
            if not part:
                return found.to(dtype)
            whole = not found.is_floating_point() and found.dtype is not torch.bool
            fits = (whole or found.is_floating_point()) if dtype.is_floating_point else whole
            if dtype is torch.bool:
                fits = found.dtype is torch.bool
            if fits:
                return torch.tensor(part, dtype=dtype)
            told = f"numbers of {str(found.dtype).removeprefix('torch.')}"
        except Exception as error:  # tensors, texts, lists of other lengths, numbers too large
            told = brief(error)
        raise OutputError(
            self._model,
            f"postprocess() gives a {type(part).__name__} for output '{spec.name}': {told}",
            expected=str(spec),
        )

    def _stacked(self, name: str, column: Sequence[Any]) -> Value:
        stack: Callable[[list[Any]], Value] = torch.stack
        if not isinstance(column[0], Tensor):
            stack = np.stack
        try:
            return stack(list(column))
        except (RuntimeError, ValueError):
            shapes = [list(one.shape) for one in column]
            raise OutputError(
                self._model,
                f"postprocess() gives output '{name}' other shapes for other rows of one request:"
                f" {shapes[:3]}",
                expected="one shape for all",
            ) from None

    # --- without a config ----------------------------------------------------------------------

    def tried(self, module: Any, item: Item) -> tuple[Any, bool]:
        """The result of a request before the config is asked, and whether it is one row's.

        Raises:
            BackendError: a hook fails, or refuses the item.
        """
        prepared = self.begin(item)()
        if isinstance(prepared, InputError):
            raise prepared
        ((inputs, items, _),) = self.group([(0, prepared)])
        columns = batching.gather(items, inputs.names).columns
        result = inputs.call(module, columns)
        if self.hooks.postprocess is None:
            return result, False
        rows = columns[0].shape[0] if self._batched else 1
        (held,) = self.split(result, rows)
        return self._read(parameters.values(held)[0], {}), True


# --- what takes the inputs -------------------------------------------------------------------


class _Whole:
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

    def begin(self, item: Item, _: Parameters) -> Callable[[], Item | InputError]:
        return partial(self._intake.admit, item)

    def group(self, items: Sequence[tuple[int, Item]]) -> list[Group]:
        return self._intake.group(items)

    def batch(self, inputs: Inputs, columns: Sequence[Value], told: _Told) -> Any:
        """What the module is called with."""
        passed = self._intake.convert(inputs, columns)
        if self._stage is None:
            return dict(zip(inputs.names, passed, strict=True))
        return inputs.call(self._stage.told(told), passed)


class _Rows:
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
        signature = _by_name(config, of_row=True) if preprocess is None else preprocess.signature()
        if preprocess is not None:
            _refuse_vague(config, signature)
        wished = config.options.preprocess_threads
        self._threads = ThreadPoolExecutor(wished) if wished is not None else None
        self._guard = guard
        # A row is taken in as a request is that has no batch dimension.
        self._intake = Intake(dataclasses.replace(config, max_batch_size=0), signature)
        self.places = self._intake.places
        self.patterns = self._intake.patterns

    def begin(self, item: Item, told: Parameters) -> Callable[[], Item | InputError]:
        if not self._batched:
            return partial(self._whole, [self._later(item, told)])
        count = count_rows(self._model, item, self._axes)
        if count == 0:
            count = InputError(self._model, "the request has no rows")
        if isinstance(count, InputError):
            refusal = count
            return lambda: refusal
        rows = [
            self._later({name: value[row, ...] for name, value in item.items()}, told)
            for row in range(count)
        ]
        return partial(self._whole, rows)

    def _later(self, row: Item, told: Parameters) -> Callable[[], Any]:
        """What gives a prepared row: a thread has begun with it, or it begins then."""
        if self._threads is None:
            return partial(self._row, row, told)
        return self._threads.submit(self._guarded, row, told).result

    def _guarded(self, row: Item, told: Parameters) -> Any:
        with self._guard():  # of this thread
            return self._row(row, told)

    def _whole(self, begun: Sequence[Callable[[], Any]]) -> Item | InputError:
        """The request of these rows."""
        rows = [row() for row in begun]
        refused = next((one for one in rows if isinstance(one, InputError)), None)
        if refused is not None:
            return refused
        return self._stack(rows) if self._collate is None else {_ROWS: parameters.column(rows)}

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
        return {f"{_NUMBERED}{number}": self._tensor(one) for number, one in enumerate(parts)}

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

    def batch(self, inputs: Inputs, columns: Sequence[Value], told: _Told) -> Any:
        """What the module is called with."""
        if self._collate is not None:
            (held,) = columns
            return self._collate.told(told)(parameters.values(held))
        if not inputs.names or not inputs.names[0].startswith(_NUMBERED):
            return dict(zip(inputs.names, columns, strict=True))
        return columns[0] if len(columns) == 1 else tuple(columns)


def _columns(item: Item) -> Inputs:
    """Columns that are known by their names only."""
    return Inputs(tuple(item), (Takes.TENSOR,) * len(item), lambda *_: None)


def _by_name(config: ModelConfig, *, of_row: bool) -> Signature:
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


# --- trees -----------------------------------------------------------------------------------


def _sent(tree: Any, device: torch.device) -> Any:
    """A tree with its tensors on a device; as it is, where they are there."""
    if isinstance(tree, Tensor):
        return tree if tree.device == device else tree.to(device)
    if isinstance(tree, Mapping | list | tuple) or _is_record(tree):
        parts = _parts(tree)
        sent = [_sent(part, device) for part in parts]
        if all(one is part for one, part in zip(sent, parts, strict=True)):
            return tree
        return _like(tree, sent)
    return tree


def _split(model: str, result: Any, rows: int) -> list[Any]:
    """What each row has of a result: of a tensor its slice, of a list its entry.

    Tuples, dicts and dataclasses are taken apart; what is none of these goes to each row as it is.
    """
    if isinstance(result, Tensor | np.ndarray) and result.ndim:
        _check_rows(model, rows, f"{type(result).__name__} {list(result.shape)}", len(result))
        return list(result)
    if isinstance(result, list):
        _check_rows(model, rows, f"list of {len(result)}", len(result))
        return result
    if isinstance(result, Mapping | tuple) or _is_record(result):
        parts = [_split(model, part, rows) for part in _parts(result)]
        return [_like(result, [part[row] for part in parts]) for row in range(rows)]
    return [result] * rows


def _check_rows(model: str, rows: int, found: str, count: int) -> None:
    if count != rows:
        raise OutputError(
            model,
            f"the result for {rows} rows holds a {found}, of which postprocess() cannot be given"
            " a row's part",
            expected="tensors whose dimension 0 is the batch, and lists with an entry a row",
            cure="Or write postprocess_batch(), which is given it as it is.",
        )


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _parts(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, list | tuple):
        return list(tree)
    return [getattr(tree, one.name) for one in dataclasses.fields(tree)]


def _like(tree: Any, parts: Sequence[Any]) -> Any:
    """A tree of the same kind, of other parts."""
    if isinstance(tree, Mapping):
        named = dict(zip(tree, parts, strict=True))
        # Hugging Face's outputs are dicts and dataclasses; what is absent there is None.
        return type(tree)(**named) if _is_record(tree) else named
    if isinstance(tree, list):
        return list(parts)
    if isinstance(tree, tuple):
        if type(tree) is tuple:
            return tuple(parts)
        makes: Any = getattr(type(tree), "_make", type(tree))  # torch's own take a sequence
        return makes(parts)
    names = [one.name for one in dataclasses.fields(tree)]
    return dataclasses.replace(tree, **dict(zip(names, parts, strict=True)))
