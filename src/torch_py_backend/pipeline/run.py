"""The path of a batch: a tuple of stages, chosen at load, and one function that runs them.

    before → group → gather → send → call → extract → fetch → scatter → after

A plain model has neither `before` nor `after`. An error is a value in place of an item or result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

from torch_py_backend.errors import BackendError
from torch_py_backend.pipeline.failures import Failures
from torch_py_backend.values import Call, Columns, Item, Items, Tree, Value, trace_context

# One request's tensors by name, or why it is refused.
Entry: TypeAlias = "Item | BackendError"
# What `scatter` and `after` make of a request: its outputs by name, another result, or its error.
Result: TypeAlias = Tree
Entries: TypeAlias = "Sequence[Entry]"
Results: TypeAlias = "Sequence[Result]"
Run: TypeAlias = "Callable[[Entries], Results]"
Gathered: TypeAlias = "tuple[Columns, Sequence[int]]"
# Returns the columns, [rows, ...], in the order that the model takes, and the rows of each item.
Gather: TypeAlias = "Callable[[Items], Gathered]"

OK = "OK"
CODES = (OK, "INVALID_ARG", "INTERNAL", "UNAVAILABLE", "CANCELLED")


@dataclass(slots=True)
class Counts:
    """The counters of an instance: totals since the warm-up.

    Plain numbers, which the metrics publisher reads periodically: `adapter.metrics`. Each has one
    writer at a time, so that no count is lost without a lock.

    Attributes:
        requests: answered requests, by the code of the answer. Known codes have a 0 from the
            beginning: Prometheus sees their first count as an increase.
        rows: rows of the model's calls, including rows that fill a bucket.
        filled_rows: rows that only fill a bucket.
        retried_rows: rows that were run again because a batch with them had failed.
        eager_calls: calls that ran without a graph because none was compiled for them.
        compiled_graphs: graphs that were compiled or loaded from the cache before READY.
        compile_cache: loads, by whether the compile cache had an entry: hit or miss.
        stream_responses: responses of streams.
        stepped_streams: streams in all calls of step().
        preprocess_seconds: with attaching states; failed calls do not count below.
    """

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CODES, 0))
    rows: int = 0
    filled_rows: int = 0
    retried_rows: int = 0
    eager_calls: int = 0
    compiled_graphs: int = 0
    compile_cache: dict[str, int] = field(default_factory=lambda: {"hit": 0, "miss": 0})
    stream_responses: int = 0
    stepped_streams: int = 0
    preprocess_seconds: float = 0.0
    gather_seconds: float = 0.0
    host_to_device_seconds: float = 0.0
    forward_seconds: float = 0.0
    device_to_host_seconds: float = 0.0
    postprocess_seconds: float = 0.0

    def count_requests(self, code: str, requests: int = 1) -> None:
        self.requests[code] = self.requests.get(code, 0) + requests


class Group(NamedTuple):
    """Items that share a call; `places` are their positions among all entries of the run."""

    gather: Gather
    call: Call
    items: Items
    places: Sequence[int]


Extract: TypeAlias = "Callable[[Tree, int], Columns]"
Fill: TypeAlias = "Callable[[Call, Columns, int], Columns]"
# Returns a result for each item from the outputs, the rows of each, and the items.
Scatter: TypeAlias = "Callable[[Columns, Sequence[int], Items], Results]"
Before: TypeAlias = "Callable[[Entries], Entries]"
After: TypeAlias = "Callable[[Results, Entries], Results]"
Grouped: TypeAlias = "tuple[Entries, Sequence[Group]]"
GroupStage: TypeAlias = "Callable[[Entries], Grouped]"


class Stages(NamedTuple):
    """What differs between models.

    Attributes:
        before: each takes and returns the entries of a run: hooks, states.
        group: refuses entries, and puts those that can share a call together.
        send: copies columns to the device; None: they are there.
        extract: returns the outputs of the model's result for a number of rows, checked.
        fill: calls the model and extracts, in as many calls as needed; None: one takes any rows.
        copy: copies an output, whose memory a later call may overwrite.
        fetch: copies outputs to the host; None: they are there.
        scatter: returns the results of items.
        after: each takes and returns the results of a run, and takes its entries.
    """

    before: tuple[Before, ...]
    group: GroupStage
    send: Callable[[Columns], Columns] | None
    extract: Extract
    fill: Fill | None
    copy: Callable[[Value], Value]
    fetch: Callable[[Columns], Columns] | None
    scatter: Scatter
    after: tuple[After, ...]


def attempt(stages: Stages, counts: Counts) -> Callable[[Group, bool], Results]:
    """Return the function that runs a group as one batch; it raises whatever the model raises.

    It copies the outputs if the model may be called again before the results are sent.
    """
    # Locals: each attribute that a call looks up costs time.
    send, extract, fill, copy = stages.send, stages.extract, stages.fill, stages.copy
    fetch, scatter = stages.fetch, stages.scatter
    clock = time.perf_counter

    def run_group(group: Group, copies: bool) -> Results:  # noqa: FBT001  hot
        began = clock()
        columns, sizes = group.gather(group.items)
        rows = sum(sizes)
        counts.rows += rows
        gathered = sent = clock()
        if send is not None:
            columns = send(columns)
            sent = clock()
        if fill is None:
            values = extract(group.call(*columns), rows)
        else:
            values = fill(group.call, columns, rows)
        called = fetched = clock()
        if fetch is not None:
            values = fetch(values)
            fetched = clock()
        if copies:
            values = [copy(value) for value in values]
        results = scatter(values, sizes, group.items)
        # Inline: a method call would cost more than these additions.
        counts.gather_seconds += gathered - began
        counts.host_to_device_seconds += sent - gathered
        counts.forward_seconds += called - sent
        counts.device_to_host_seconds += fetched - called
        return results

    return run_group


def build(stages: Stages, failures: Failures, counts: Counts) -> Run:
    """Return the function that runs entries: it returns a result or an error for each, in order.

    The model runs in the trace context of the first request of a group that has one.
    """
    run_group = attempt(stages, counts)
    before, group_entries, after = stages.before, stages.group, stages.after

    def run_items(group: Group, copies: bool, items: Items, again: bool) -> Results:  # noqa: FBT001
        rows = counts.rows
        try:
            with trace_context(items):
                tried = group._replace(items=items) if again else group
                return run_group(tried, copies or again)
        finally:
            counts.retried_rows += (counts.rows - rows) * again

    def run(entries: Entries) -> Results:
        if before:
            began = time.perf_counter()
            for prepare in before:
                entries = prepare(entries)
            counts.preprocess_seconds += time.perf_counter() - began
        entries, groups = group_entries(entries)
        results: Results = entries
        for number, group in enumerate(groups, 1):
            copies = number < len(groups)
            outcomes = failures.isolate(group.items, partial(run_items, group, copies))
            if len(group.items) == len(entries):
                results = outcomes
            else:
                results = list(results)
                for place, outcome in zip(group.places, outcomes, strict=True):
                    results[place] = outcome
        if after:
            began = time.perf_counter()
            for finish in after:
                results = finish(results, entries)
            counts.postprocess_seconds += time.perf_counter() - began
        return results

    return run
