"""Gather items into a batch, fit it to the model's row counts, scatter its outputs to items."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import BackendError, ConfigError
from torch_py_backend.pipeline.run import Counts, Entries, Extract, Fill
from torch_py_backend.values import ANY_ROWS, Call, Columns, Item, Items, Rows, Value, to_column


def row_counts(config: ModelConfig, accepted: Rows, *, fixed: bool) -> Rows:
    """Return how many rows calls have; ConfigError if the artifact accepts none of the buckets.

    `fixed`: each row count is prepared separately, as with static shapes.
    """
    if not config.max_batch_size or config.concatenates:
        return ANY_ROWS
    # The least rows of a program may exceed max_batch_size: its batches are padded.
    most = max(accepted.least, min(accepted.most or config.max_batch_size, config.max_batch_size))
    buckets = config.options.batch_buckets
    if buckets is None:
        buckets = powers_of_two(most) if fixed else ()
    usable = tuple(size for size in buckets if accepted.least <= size <= most)
    if buckets and not usable:
        raise ConfigError(
            f"BATCH_BUCKETS is {', '.join(map(str, buckets))}",
            expected=f"row counts among {accepted.least} to {most}, which the model takes",
        )
    if not usable:
        return Rows(accepted.least, most)
    return Rows(usable[0], usable[-1], usable)


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and the number itself, so that less than half of a call is padding."""
    powers = [1 << power for power in range((most - 1).bit_length())]
    return (*powers, most)


def grouped(
    entries: Entries, keys_of: Callable[[Items], Iterable[Hashable]]
) -> list[tuple[Sequence[int], Items]]:
    """Return the items with equal keys together, behind their places among the entries."""
    items: list[Any] = [entry for entry in entries if not isinstance(entry, BackendError)]
    if len(items) == len(entries) and (len(items) == 1 or len(set(keys_of(items))) == 1):
        return [(range(len(items)), items)]  # most batches
    places = [place for place, entry in enumerate(entries) if not isinstance(entry, BackendError)]
    groups: dict[Hashable, tuple[list[int], list[Item]]] = {}
    for key, place, item in zip(keys_of(items), places, items, strict=True):
        members = groups.setdefault(key, ([], []))
        members[0].append(place)
        members[1].append(item)
    return list(groups.values())


def concatenate(values: Sequence[Any]) -> Value:
    """Concatenate values on dimension 0; a single one is passed on without a copy."""
    if len(values) == 1:
        return to_column(values[0])
    join = torch.cat if isinstance(values[0], Tensor) else np.concatenate
    return to_column(join(list(values)))


def filled(
    limits: Rows,
    extract: Extract,
    copy: Callable[[Value], Value],
    counts: Counts,
) -> Fill:
    """Return `fill` for a model that takes certain numbers of rows: the last row fills a call."""

    def fill(call: Call, columns: Columns, rows: int) -> Columns:
        if limits.accept(rows):
            return extract(call(*columns), rows)
        step = limits.most or rows
        pieces: list[list[Value]] = []
        for start in range(0, rows, step):
            if pieces:  # the model may overwrite the outputs of its previous call
                pieces[-1] = list(map(copy, pieces[-1]))
            stop = min(start + step, rows)
            size = limits.filled(stop - start)
            missing = start + size - stop
            counts.rows += missing
            parts = [
                concatenate([column[start:stop], *[column[stop - 1 : stop]] * missing])
                for column in columns
            ]
            outputs = extract(call(*parts), size)
            counts.filled_rows += missing
            pieces.append([value[: stop - start] for value in outputs])
        return list(map(concatenate, zip(*pieces, strict=True)))

    return fill


def scatter(
    outputs: Sequence[Value | list[Value]],
    names: Sequence[str],
    sizes: Sequence[int],
) -> list[dict[str, Value]]:
    """Return each item's rows of each output as views; a list of outputs has one for each item."""
    if len(sizes) == 1:
        values = [output[0] if isinstance(output, list) else output for output in outputs]
        return [dict(zip(names, values, strict=True))]
    parts = [output if isinstance(output, list) else split(output, sizes) for output in outputs]
    return [dict(zip(names, rows, strict=True)) for rows in zip(*parts, strict=True)]


def split(output: Value, sizes: Sequence[int]) -> Columns:
    if isinstance(output, Tensor):
        return output.split_with_sizes(list(sizes))
    starts = itertools.accumulate(sizes, initial=0)
    return [output[start:stop] for start, stop in itertools.pairwise(starts)]
