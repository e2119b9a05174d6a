"""Stages that models with features have; `engine.build` puts them into a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch_py_backend.batching import gather_scatter, traced_item
from torch_py_backend.batching.counters import Counts
from torch_py_backend.batching.gather_scatter import Item, Rows, Value
from torch_py_backend.batching.output_extraction import Finite
from torch_py_backend.batching.padding import Padding
from torch_py_backend.batching.ragged import Ragged
from torch_py_backend.errors import BackendError
from torch_py_backend.pipeline.failures import Failures, reported
from torch_py_backend.pipeline.run import Entry, Result

Gather: TypeAlias = "Callable[[Sequence[Item]], tuple[Sequence[Value], Sequence[int]]]"
Scatter: TypeAlias = "Callable[[Sequence[Value], Sequence[int], Sequence[Item]], Sequence[Result]]"


def without_rows(gather: Gather, items: Sequence[Item]) -> tuple[Sequence[Value], Sequence[int]]:
    """Gather an item without a batch dimension; it counts as one row."""
    columns, _ = gather(items)
    return columns, (1,)


class Filled:
    """Calls of a model that takes certain numbers of rows: as many as a batch needs.

    Args:
        rows: how many rows a call takes.
        extract: returns the outputs of a result for a number of rows.
        copy: copies an output.
        counts: rows that fill a call are counted here, the others by the pipeline.
    """

    def __init__(
        self,
        rows: Rows,
        extract: Callable[[Any, int], Sequence[Value]],
        copy: Callable[[Value], Value],
        counts: Counts,
    ) -> None:
        self._rows, self._extract, self._copy, self._counts = rows, extract, copy, counts

    def __call__(
        self, call: Callable[..., Any], columns: Sequence[Value], rows: int
    ) -> Sequence[Value]:
        """Return the outputs of a batch."""
        if self._rows.accept(rows):
            return self._extract(call(*columns), rows)
        pieces: list[list[Value]] = []
        for piece, present in gather_scatter.fit(columns, self._rows):
            # The model may overwrite the outputs of its previous call.
            pieces[-1:] = [list(map(self._copy, last)) for last in pieces[-1:]]
            size = piece[0].shape[0]
            self._counts.rows += size - present
            outputs = self._extract(call(*piece), size)
            self._counts.filled_rows += size - present
            pieces.append([value[:present] for value in outputs])
        return gather_scatter.join(pieces)


# --- after the call ----------------------------------------------------------------------------


def scatter_states(
    scatter: Scatter,
    places: Sequence[int],
    values: Sequence[Any],
    sizes: Sequence[int],
    items: Sequence[Item],
) -> Sequence[Result]:
    """Scatter copies of states: the model may return views of memory that it writes again."""
    owned = list(values)
    for place in places:
        owned[place] = gather_scatter.clone_rows(values[place], sizes)
    return scatter(owned, sizes, items)


def scatter_ragged(
    scatter: Scatter,
    ragged: Ragged,
    values: Sequence[Any],
    sizes: Sequence[int],
    items: Sequence[Item],
) -> Sequence[Result]:
    """Scatter batch outputs by the shapes of their sources."""
    split: Sequence[Any] = ragged.split(items, values)
    return scatter(split, sizes, items)


def scatter_padded(
    scatter: Scatter,
    padding: Padding,
    values: Sequence[Value],
    sizes: Sequence[int],
    items: Sequence[Item],
) -> Sequence[Result]:
    """Scatter outputs, and cut them to the lengths of their items."""
    results = scatter(values, sizes, items)
    padding.cut(results, items)
    return results


def scatter_finite(
    scatter: Scatter,
    finite: Finite,
    values: Sequence[Value],
    sizes: Sequence[int],
    items: Sequence[Item],
) -> Sequence[Result]:
    """Scatter outputs, and refuse the items whose outputs hold NaN or infinity."""
    results = scatter(values, sizes, items)
    if finite.holds(values):
        return results
    refusals = [finite.refusal(result) for result in results]
    return [
        result if refusal is None else reported(refusal)
        for result, refusal in zip(results, refusals, strict=True)
    ]


# --- hooks for each request --------------------------------------------------------------------


class Hooked:
    """Hooks that run for each request, before or after the calls of a batch.

    Args:
        hook: takes what `entries` or `results` hold of a request.
        count: adds the seconds that the hooks have taken.
        failures: classifies their exceptions.
    """

    def __init__(
        self,
        hook: Callable[..., Any],
        count: Callable[[float], None],
        failures: Failures,
    ) -> None:
        self._hook, self._count, self._failures = hook, count, failures

    def before(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Return the prepared items, with the trace contexts of their requests."""
        began = time.perf_counter()
        prepared: list[Entry] = []
        for entry in entries:
            result: Any = entry
            if not isinstance(entry, BackendError):
                result = self._call(entry, entry)
                if not isinstance(result, BackendError):
                    result = traced_item.like(entry, result)
            prepared.append(result)
        self._count(time.perf_counter() - began)
        return prepared

    def after(self, results: Sequence[Result], entries: Sequence[Entry]) -> Sequence[Result]:
        """Return the finished results."""
        began = time.perf_counter()
        finished = [
            result if isinstance(result, BackendError) else self._call(entry, result, entry)
            for result, entry in zip(results, entries, strict=True)
        ]
        self._count(time.perf_counter() - began)
        return finished

    def _call(self, entry: Any, *args: Any) -> Any:
        """Return the result of a hook in the trace context of a request, or the request's error."""
        try:
            with traced_item.entered((entry,)):
                return self._hook(*args)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failure = self._failures.classify(error)
        return self._failures.refusal(failure)
