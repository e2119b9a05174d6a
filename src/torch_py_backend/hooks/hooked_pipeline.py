"""What hooks do around a module: rows prepared, batches made and passed, results read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.batching import gather_scatter, trees
from torch_py_backend.batching.gather_scatter import Item, Value
from torch_py_backend.batching.grouping import Group
from torch_py_backend.batching.output_extraction import Finite, Taker
from torch_py_backend.batching.runtime import Runtime
from torch_py_backend.config import request_parameters
from torch_py_backend.config.model_config import ModelConfig, TensorSpec
from torch_py_backend.config.request_parameters import Parameters
from torch_py_backend.errors import InputError, OutputError, brief, shown
from torch_py_backend.hooks.preprocessing import NUMBERED, ROWS, ByBatch, ByRow, Told, by_name
from torch_py_backend.hooks.user_hooks import Hooks
from torch_py_backend.signature.binding import (
    Inputs,
    Signature,
    Takes,
    bind_inputs,
    is_path,
    ordinal,
)

# What an outcome holds before postprocess().
UNREAD = (ROWS,)


def own_rows(column: Value) -> Value:
    """Return a copy of what `Stages.split` made: results of rows, with their tensors."""
    return request_parameters.column(map(trees.owned, request_parameters.values(column)))


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
        self._intake: ByBatch | ByRow
        if hooks.preprocess is None and hooks.collate is None:
            # inference() has the inputs by their names; what the module takes is its affair.
            taken = signature if hooks.inference is None else by_name(config, of_row=False)
            self._intake = ByBatch(config, hooks.preprocess_batch, taken)
        else:
            self._intake = ByRow(config, hooks, surroundings.guard)
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

    def stages(self) -> list[tuple[str, Any, str]]:
        """The stages: the name of each, the object that has it, and its attribute."""
        return [
            ("prepare", self, "begin"),
            ("prepare", self, "_prepared"),
            ("group", self, "group"),
            ("forward", self, "_pass"),
            ("finish", self, "finish"),
            *((one.name, one, "function") for one in self.hooks.stages),
        ]

    # --- before the module ---------------------------------------------------------------------

    def begin(self, item: Item, *, more: bool = False) -> Callable[[], Item | InputError]:
        """Begin to prepare a request's item; what is returned ends it.

        That gives what batches are made of, or raises what a hook fails with.

        Args:
            item: the request's.
            more: whether others are prepared before this one is used: a hook may return views of
                memory that its next call overwrites.
        """
        item = dict(item)
        told = request_parameters.taken(item)
        return partial(self._prepared, self._intake.begin(item, told, more=more), told)

    def _prepared(
        self, prepare: Callable[[], Item | InputError], told: Parameters
    ) -> Item | InputError:
        made = prepare()
        if isinstance(made, InputError) or not self._carries:
            return made
        first = next(iter(made.values()), None)
        rows = first.shape[0] if self._batched and first is not None else 1
        return {**made, request_parameters.KEY: request_parameters.column([told] * rows)}

    def group(self, items: Sequence[tuple[int, Item]]) -> list[Group]:
        """Items that can share a call."""
        whole = dict(items)
        bare = [
            (at, {name: value for name, value in item.items() if name != request_parameters.KEY})
            for at, item in items
        ]
        return [
            Group(self._passed(inputs), [whole[at] for at in positions], positions)
            for inputs, _, positions in self._intake.group(bare)
        ]

    def _passed(self, inputs: Inputs) -> Inputs:
        """How columns are passed, those of the parameters among them."""
        extra = (request_parameters.KEY,) if self._carries else ()
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
        told: Told = ()
        if self._carries:
            *columns, held = columns
            told = request_parameters.values(held)
        batch = trees.sent(self._intake.batch(inputs, columns, told), self._device)
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
            named = {f"{NUMBERED}{number}": value for number, value in enumerate(parts)}
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
        result = trees.sent(result, torch.device("cpu"))
        parts = trees.split(self._model, result, rows) if self._batched else [result]
        return [request_parameters.column(parts)]

    @property
    def finishes(self) -> bool:
        """Whether outcomes are what `split` made, and `finish` makes outputs of them."""
        return self.hooks.postprocess is not None

    def finish(
        self, outcome: Mapping[str, Value], item: Item, *, more: bool = False
    ) -> dict[str, Value]:
        """One request's outputs, read by postprocess() from the results of its rows.

        Args:
            outcome: what `split` made of the request's part of a batch.
            item: what `begin` made of the request.
            more: as for `begin`.

        Raises:
            BackendError: postprocess() fails, or returns what the config contradicts.
        """
        results = request_parameters.values(outcome[ROWS])
        told = (
            request_parameters.values(item[request_parameters.KEY])
            if self._carries
            else [()] * len(results)
        )
        more = more or len(results) > 1
        rows = []
        for one in zip(results, told, strict=True):
            row = self._taker.take(self._arranged(self._read(*one)), 1)
            rows.append([gather_scatter.own(value) for value in row] if more else row)
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
        columns = gather_scatter.gather(items, inputs.names).columns
        result = inputs.call(module, columns)
        if self.hooks.postprocess is None:
            return result, False
        rows = columns[0].shape[0] if self._batched else 1
        (held,) = self.split(result, rows)
        return self._read(request_parameters.values(held)[0], {}), True
