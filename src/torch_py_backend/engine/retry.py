"""Retries of a failed batch: bisect it, run it in smaller calls, or refuse it."""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import torch

from torch_py_backend import composition
from torch_py_backend.batching import gather_scatter, runtime
from torch_py_backend.batching.counters import Counts
from torch_py_backend.batching.gather_scatter import Outcome, Rows, Value
from torch_py_backend.batching.grouping import Group
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine import faults
from torch_py_backend.engine.bisection import MAX_CALLS, bisect
from torch_py_backend.engine.memory_limits import Limit, MemoryLimits
from torch_py_backend.errors import (
    BackendError,
    ForwardError,
    HookError,
    InputError,
    LoadError,
    OutOfMemoryError,
    OutputError,
    UnavailableError,
    summarize,
)

log = logging.getLogger(__name__)

# Log only the innermost frames of a traceback: an endless recursion has a thousand.
_FRAMES = -64
# The log gets the beginning and the end of a longer traceback: an exception's message may contain
# megabytes of a client's text, and Triton passes log messages through shared memory.
_MAX_CHARACTERS = 1 << 16

E = TypeVar("E", bound=BackendError)


def reported(error: E, text: str = "") -> E:
    """Return the error of a request, marked for the log with the traceback of its cause."""
    error.reported, error.traceback = True, text
    return error


@dataclass(frozen=True, slots=True)
class Failure:
    """The cause of a failed call, without the frames that would keep its memory alive.

    Attributes:
        error: the error for the clients.
        text: the traceback; empty where it adds nothing to the error.
        memory: whether memory ran out.
        repeats: whether no item is run again: every one would fail with this error, or the failed
            call has called other models, which would get its rows twice.
    """

    error: BackendError
    text: str = ""
    memory: bool = False
    repeats: bool = False


class Attempt(Protocol):
    """Runs a group as one batch, under the model's guard; raises whatever the model raises."""

    def __call__(self, group: Group, *, copy_outputs: bool) -> Sequence[Outcome]:
        """Run the group.

        With `copy_outputs`, the model may be called again before the outcomes are sent. They are
        copies: a model may return views of memory that its next call overwrites.
        """


# A range of an item's rows: the item's index in the group, the first row, the end of the range.
_Part: TypeAlias = "tuple[int, int, int]"


class RetryPolicy:
    """Retries failed batches of one model.

    Attributes:
        fatal: the error for every request once the process cannot use its device; else None.
        reason: the cause of `fatal` in a few words.
        capacity: the limits on rows for one call.
        on_call: called before each call, which then gets a time limit of its own.
        calls_before: `composition.calls` before the last attempt.

    Args:
        attempt: runs a group.
        called: the name of the model's function that an attempt calls.
        rows: the row counts that the model takes.
        repeats: returns whether the model may be called again with that many items that were
            passed to it before.
        device: the device that is probed after a failure.
    """

    def __init__(
        self,
        config: ModelConfig,
        attempt: Attempt,
        *,
        called: str,
        rows: Rows,
        repeats: Callable[[int], bool],
        device: torch.device,
        counts: Counts,
    ) -> None:
        self.fatal: UnavailableError | None = None
        self.reason = ""
        # Calls of fewer rows would shift the places by which a model may keep states.
        self._batched = config.max_batch_size > 0 and not config.keeps_slots
        self.capacity = MemoryLimits(rows if self._batched else gather_scatter.ANY_ROWS)
        self.on_call: Callable[[], None] = lambda: None
        self.calls_before = 0
        self._retries_all = config.options.retry_failed_batch
        self._model = config.name
        self._attempt = attempt
        self._called = called
        self._repeats = repeats
        # The rows of a ragged request are not separable: they stay in one call.
        self._divides = not config.concatenates
        self._device = device
        self._counts = counts

    def run(self, group: Group, *, copy_outputs: bool) -> Sequence[Outcome]:
        """Run a group within the limits for its shape; retry if it fails."""
        if self.fatal is not None:
            return [self.fatal] * len(group.items)
        shape, rows = _shape(group), sum(self._sizes(group))
        most = self.capacity.most(shape) if self._batched else None
        if most is not None and rows > most:
            before = self.capacity.remembered(shape)
            return self._run_in_parts(
                group, before, iter(range(MAX_CALLS)), copy_outputs=copy_outputs
            )
        result = self._try(group, copy_outputs=copy_outputs)
        if isinstance(result, Failure):
            return self.retry_or_refuse(group, result, copy_outputs=copy_outputs)
        self.capacity.fitted(shape, rows)
        return result

    def retry_or_refuse(
        self,
        group: Group,
        failure: Failure,
        calls: Iterator[object] | None = None,
        *,
        copy_outputs: bool,
    ) -> Sequence[Outcome]:
        """Return the outcomes of a group that failed: retry it or refuse it.

        Do not call this in an except block: the next exception would keep the handled one as its
        context.

        `calls` limits the bisections of the batch that the group is a part of; None: the group is
        the batch.
        """
        calls = calls or iter(range(MAX_CALLS))
        if self.fatal is None and failure.memory and self._batched:
            shape, rows = _shape(group), sum(self._sizes(group))
            before = self.capacity.remembered(shape)
            smaller = self._lower_limit(shape, rows)
            if smaller and not failure.repeats and self._repeats(len(group.items)):
                self._counts.retried_rows += rows
                return self._run_in_parts(group, before, calls, copy_outputs=copy_outputs)
        final = failure.memory or failure.repeats or self.fatal is not None
        if final or len(group.items) == 1 or not self._repeats(len(group.items)):
            return [self.refusal(failure)] * len(group.items)
        return self._bisect(group, failure, calls)

    def _bisect(self, group: Group, failure: Failure, calls: Iterator[object]) -> Sequence[Outcome]:
        def part(places: Sequence[int]) -> Group:
            items = [group.items[place] for place in places]
            return Group(group.inputs, items, [group.positions[place] for place in places])

        def attempt(places: Sequence[int]) -> Sequence[Outcome] | Failure:
            half = part(places)
            self._counts.retried_rows += sum(self._sizes(half))
            return self._try(half, copy_outputs=True)

        places = range(len(group.items))
        results = bisect(
            places, attempt, failure, calls=calls, hopeless=lambda: self.fatal is not None
        )
        return [
            self.retry_or_refuse(part([place]), result, calls, copy_outputs=True)[0]
            if isinstance(result, Failure)
            else result
            for place, result in zip(places, results, strict=True)
        ]

    def _run_in_parts(
        self, group: Group, before: Limit | None, calls: Iterator[object], *, copy_outputs: bool
    ) -> list[Outcome]:
        """Run a group in calls of as many rows as fit in memory.

        `before` is the limit of its shape before this group.
        """
        shape, sizes = _shape(group), self._sizes(group)
        pending = deque((place, 0, size) for place, size in enumerate(sizes))
        pieces: list[list[dict[str, Value]]] = [[] for _ in sizes]
        refused: dict[int, BackendError] = {}
        never_fits = False
        while pending:
            parts = list(_take(pending, self.capacity.most(shape)))
            subgroup = _of_parts(group, parts, sizes)
            result = self._try(subgroup, copy_outputs=copy_outputs or bool(pending))
            if isinstance(result, Failure) and result.memory and self.fatal is None:
                rows = sum(last - first for _, first, last in parts)
                smaller = self._lower_limit(shape, rows)
                if smaller and not result.repeats and self._repeats(2):  # parts are copies
                    self._counts.retried_rows += rows
                    pending.extendleft(reversed(parts))
                    continue
                result = [self.refusal(result)] * len(parts)
                never_fits |= not smaller
            elif isinstance(result, Failure):
                result = self.retry_or_refuse(subgroup, result, calls, copy_outputs=True)
            for (place, _, _), outcome in zip(parts, result, strict=True):
                if isinstance(outcome, BackendError):
                    refused[place] = outcome
                else:
                    pieces[place].append(outcome)
        if never_fits:
            self.capacity.restore(shape, before)
        elif not refused:
            self.capacity.fitted(shape, sum(sizes))
        return [
            refused[place] if place in refused else self._join(outputs)
            for place, outputs in enumerate(pieces)
        ]

    def _sizes(self, group: Group) -> list[int]:
        """Return the rows of each item.

        It is 0 where there is no input, and 1 where the rows of an item stay together.
        """
        names = group.inputs.names if self._divides else ()
        default = 0 if self._divides else 1
        return [item[names[0]].shape[0] if names else default for item in group.items]

    def _join(self, pieces: Sequence[dict[str, Value]]) -> Outcome:
        """Return one item's outputs, joined from those of its calls."""
        if len(pieces) == 1:
            return pieces[0]
        names = tuple(pieces[0])
        try:
            joined = gather_scatter.join([[piece[name] for name in names] for piece in pieces])
        except (RuntimeError, ValueError):
            return OutputError(
                self._model,
                f"{self._called}() returned other shapes for other rows of one request, which does"
                " not fit in memory as a whole",
                expected="outputs that can be joined",
            )
        return dict(zip(names, joined, strict=True))

    def _try(self, group: Group, *, copy_outputs: bool) -> Sequence[Outcome] | Failure:
        if self.fatal is not None:
            return Failure(self.fatal, repeats=True)
        self.on_call()
        self.calls_before = composition.calls
        try:
            return self._attempt(group, copy_outputs=copy_outputs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return self.classify(error)

    def classify(self, error: BaseException, called: str | None = None) -> Failure:
        """Classify an exception and release its frames.

        `called` is the name of the model's function that raised it, if not an attempt's.
        """
        text = "".join(traceback.format_exception(error, limit=_FRAMES)).rstrip()
        if len(text) > 2 * _MAX_CHARACTERS:
            text = f"{text[:_MAX_CHARACTERS]} […] {text[-_MAX_CHARACTERS:]}"
        memory = faults.out_of_memory(error)
        cause = self._fatal_cause(error)
        if cause is not None:
            if self.fatal is None:
                self.reason = summarize(cause)
                self.fatal = reported(UnavailableError.fatal(self._model, self.reason), text)
            failure = Failure(self.fatal, text, repeats=True)
        elif memory:
            failure = Failure(OutOfMemoryError(self._model), text, memory=True)
        elif isinstance(error, BackendError):
            # A LoadError is a conflict between config and model: every item fails with it. Only
            # errors of the user's own code need a traceback.
            shown = text if isinstance(error, HookError) else ""
            failure = Failure(error, shown, repeats=isinstance(error, LoadError))
        else:
            failure = Failure(ForwardError(self._model, error, called or self._called), text)
        if composition.calls != self.calls_before and not self._retries_all:
            failure = dataclasses.replace(failure, repeats=True)
        faults.release(error)
        if memory and cause is None:
            runtime.free()
        return failure

    def _fatal_cause(self, error: BaseException) -> BaseException | None:
        """Return the error that made the device unusable for this process, or None.

        Not all runtimes pass on CUDA's errors (AOTInductor does not), so the device is probed.
        """
        if faults.is_sticky(error):
            return error
        try:
            runtime.probe(self._device)
        except Exception as probe_error:  # torch raises many classes for a lost device
            return probe_error
        return None

    def _lower_limit(self, shape: Hashable, rows: int) -> bool:
        """Lower the limit of a shape below `rows`; return whether there are smaller calls."""
        less = self.capacity.failed(shape, rows)
        if less is None:
            return False
        log.warning(
            "model '%s': memory ran out with %d rows of the shapes %s; they are called with at most"
            " %d for a while.",
            self._model,
            rows,
            shape,
            less,
        )
        return True

    def unreadable(self, error: Exception) -> BackendError:
        """Return the error of a request that cannot be read, due to its client or the device."""
        reason, failure = summarize(error), self.classify(error)
        if self.fatal is not None or failure.memory:
            return self.refusal(failure)
        return InputError(self._model, f"the request cannot be read: {reason}")

    def refusal(self, failure: Failure) -> BackendError:
        """Return the error of a failure, marked for the log unless its client caused it.

        Return `fatal` once there is that.
        """
        if self.fatal is None and isinstance(failure.error, InputError):
            return failure.error
        return self.fatal or reported(failure.error, failure.text)


def _shape(group: Group) -> tuple[tuple[int, ...], ...]:
    """Return the inputs' shapes without rows; of padded inputs the longest in each dimension."""
    return tuple(
        tuple(map(max, zip(*(item[name].shape[1:] for item in group.items), strict=True)))
        for name in group.inputs.names
        if name in group.items[0]  # not a batch input, which is created for each call
    )


def _take(pending: deque[_Part], most: int | None) -> Iterator[_Part]:
    """Take parts of at most `most` rows in total from the left, but at least one part."""
    left = most
    while pending and (left is None or left > 0 or pending[0][1] == pending[0][2]):
        place, first, last = pending.popleft()
        if left is not None:
            stop = min(last, first + left)
            if stop < last:
                pending.appendleft((place, stop, last))
            last = stop
            left -= last - first
        yield place, first, last


def _of_parts(group: Group, parts: Sequence[_Part], sizes: Sequence[int]) -> Group:
    items, positions = [], []
    for place, first, last in parts:
        item = group.items[place]
        whole = (first, last) == (0, sizes[place])
        rows = {key: value if whole else value[first:last] for key, value in item.items()}
        if len(parts) == 1:
            # A single item is passed without a copy, and the model may write to it before a retry.
            rows = {key: gather_scatter.clone(value) for key, value in rows.items()}
        items.append(rows)
        positions.append(group.positions[place])
    return Group(group.inputs, items, positions)
