"""Stages that models with features have; `engine.engine` puts them into a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch_py_backend.pipeline import batches
from torch_py_backend.pipeline.failures import Failures
from torch_py_backend.pipeline.padding import Padding
from torch_py_backend.pipeline.ragged import Split
from torch_py_backend.pipeline.run import Counts, Extract, Fill, Result, Results, Scatter
from torch_py_backend.values import Call, Columns, Item, Items, Rows, Value, trace_context

T = TypeVar("T")


def filled(
    limits: Rows,
    extract: Extract,
    copy: Callable[[Value], Value],
    counts: Counts,
) -> Fill:
    """Return `fill` for a model that takes certain numbers of rows.

    Rows that fill a call are counted here, the others by the pipeline.
    """

    def fill(call: Call, columns: Columns, rows: int) -> Columns:
        if limits.accept(rows):
            return extract(call(*columns), rows)
        pieces: list[list[Value]] = []
        for piece, present in batches.fit(columns, limits):
            if pieces:  # the model may overwrite the outputs of its previous call
                pieces[-1] = list(map(copy, pieces[-1]))
            size = piece[0].shape[0]
            counts.rows += size - present
            outputs = extract(call(*piece), size)
            counts.filled_rows += size - present
            pieces.append([value[:present] for value in outputs])
        return list(map(batches.concatenate, zip(*pieces, strict=True)))

    return fill


def scatter_by_name(
    names: Sequence[str],
    split: Split | None,
    padding: Padding | None,
) -> Scatter:
    """Return what makes a result for each item from the outputs of a batch."""

    def scatter(outputs: Columns, sizes: Sequence[int], items: Items) -> Results:
        parts = list(outputs) if split is None else split(items, outputs)
        results = batches.scatter(parts, names, sizes)
        if padding is not None:
            padding.cut(results, items)
        return results

    return scatter


def guarded(
    failures: Failures,
    item: Item,
    function: Call,
    *args: object,
) -> Result:
    """Return the result of a function in the trace context of a request, or the request's error."""
    try:
        with trace_context((item,)):
            return function(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return failures.classify(error)


def timed(
    counts: Counts,
    name: str,
    stage: Callable[..., T],
) -> Callable[..., T]:
    """Return a stage whose seconds are added to a field of the counters."""

    def run(*args: object) -> T:
        began = time.perf_counter()
        results = stage(*args)
        setattr(counts, name, getattr(counts, name) + time.perf_counter() - began)
        return results

    return run
