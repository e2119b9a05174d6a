"""Stages that models with features have; `engine.build` puts them into a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch_py_backend import values
from torch_py_backend.pipeline import batches
from torch_py_backend.pipeline.counters import Counts
from torch_py_backend.pipeline.failures import Failures, reported
from torch_py_backend.pipeline.outputs import Finite
from torch_py_backend.pipeline.padding import Padding
from torch_py_backend.pipeline.ragged import Ragged
from torch_py_backend.pipeline.run import Entry, Result
from torch_py_backend.values import Item, Rows, Value

Scatter: TypeAlias = "Callable[[Sequence[Value], Sequence[int], Sequence[Item]], Sequence[Result]]"


def filled(
    limits: Rows,
    extract: Callable[[Any, int], Sequence[Value]],
    copy: Callable[[Value], Value],
    counts: Counts,
) -> Callable[[Callable[..., Any], Sequence[Value], int], Sequence[Value]]:
    """Return `fill` for a model that takes certain numbers of rows.

    Rows that fill a call are counted here, the others by the pipeline.
    """

    def fill(call: Callable[..., Any], columns: Sequence[Value], rows: int) -> Sequence[Value]:
        if limits.accept(rows):
            return extract(call(*columns), rows)
        pieces: list[list[Value]] = []
        for piece, present in batches.fit(columns, limits):
            # The model may overwrite the outputs of its previous call.
            pieces[-1:] = [list(map(copy, last)) for last in pieces[-1:]]
            size = piece[0].shape[0]
            counts.rows += size - present
            outputs = extract(call(*piece), size)
            counts.filled_rows += size - present
            pieces.append([value[:present] for value in outputs])
        return batches.join(pieces)

    return fill


# --- after the call ----------------------------------------------------------------------------


def scatter_states(
    scatter: Scatter,
    places: Sequence[int],
    outputs: Sequence[Any],
    sizes: Sequence[int],
    items: Sequence[Item],
) -> Sequence[Result]:
    """Scatter copies of states: the model may return views of memory that it writes again."""
    owned = list(outputs)
    for place in places:
        owned[place] = batches.clone_rows(outputs[place], sizes)
    return scatter(owned, sizes, items)


def scatter_ragged(
    scatter: Scatter,
    ragged: Ragged,
    outputs: Sequence[Any],
    sizes: Sequence[int],
    items: Sequence[Item],
) -> Sequence[Result]:
    """Scatter batch outputs by the shapes of their sources."""
    split: Sequence[Any] = ragged.split(items, outputs)
    return scatter(split, sizes, items)


def scatter_padded(
    scatter: Scatter,
    padding: Padding,
    outputs: Sequence[Value],
    sizes: Sequence[int],
    items: Sequence[Item],
) -> Sequence[Result]:
    """Scatter outputs, and cut them to the lengths of their items."""
    results = scatter(outputs, sizes, items)
    padding.cut(results, items)
    return results


def scatter_finite(
    scatter: Scatter,
    finite: Finite,
    outputs: Sequence[Value],
    sizes: Sequence[int],
    items: Sequence[Item],
) -> Sequence[Result]:
    """Scatter outputs, and refuse the items whose outputs hold NaN or infinity."""
    results = scatter(outputs, sizes, items)
    if finite.holds(outputs):
        return results
    refusals = [finite.refusal(result) for result in results]
    return [
        result if refusal is None else reported(refusal)
        for result, refusal in zip(results, refusals, strict=True)
    ]


# --- hooks for each request --------------------------------------------------------------------


def guarded(failures: Failures, item: Item, function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function in the trace context of a request, or the request's error."""
    try:
        with values.trace_context((item,)):
            return function(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        failure = failures.classify(error)
    return failures.refusal(failure)


def prepared(
    prepare: Callable[[Sequence[Entry]], Sequence[Entry]], counts: Counts, entries: Sequence[Entry]
) -> Sequence[Entry]:
    """Return the items that hooks prepare."""
    began = time.perf_counter()
    results = prepare(entries)
    counts.preprocess_seconds += time.perf_counter() - began
    return results


def finished(
    finish: Callable[[Sequence[Result], Sequence[Entry]], Sequence[Result]],
    counts: Counts,
    results: Sequence[Result],
    entries: Sequence[Entry],
) -> Sequence[Result]:
    """Return the outputs that a hook makes of the results."""
    began = time.perf_counter()
    outcomes = finish(results, entries)
    counts.postprocess_seconds += time.perf_counter() - began
    return outcomes
