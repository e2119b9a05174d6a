"""What becomes of a batch that failed: narrowed down, run in smaller calls, or refused."""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch_py_backend.batching import gather_scatter
from torch_py_backend.batching.counters import Counts
from torch_py_backend.batching.gather_scatter import Item, Outcome, Rows, Value
from torch_py_backend.batching.grouping import Group
from torch_py_backend.engine import faults
from torch_py_backend.engine.bisection import Budget, narrow
from torch_py_backend.engine.memory_limits import Capacity, Limit
from torch_py_backend.errors import (
    BackendError,
    ForwardError,
    HookError,
    LoadError,
    OutOfMemoryError,
    OutputError,
    UnavailableError,
    brief,
)

log = logging.getLogger(__name__)

# Calls that narrowing one batch down may take, with all its parts: enough for 64 items.
_CALLS = 128
# Of a traceback the innermost frames are told: an endless recursion has a thousand.
_FRAMES = -64


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call failed, without the frames that would keep its memory.

    Attributes:
        error: what clients are told.
        text: the traceback of what was raised; empty where there is nothing to be seen in it.
        memory: memory ran out.
        repeats: every item would fail of it.
    """

    error: BackendError
    text: str = ""
    memory: bool = False
    repeats: bool = False


# A stretch of an item's rows: its place in the group, its first row and the one after its last.
_Part: TypeAlias = "tuple[int, int, int]"


class Recovery:
    """One model's second tries.

    Attributes:
        reports: of what failed: a sentence and a traceback, and the places of the items among all
            of the run. For the caller to tell and to clear.
        places: where the items of a run stand among those that reports are about; None: they are
            all of them.
        fatal: what every request is to be told, once the process is beyond help.
        reason: what `fatal` is for, in a few words.
        capacity: the row counts that calls are kept to.
        begins: called before each try but the first: the model is given time for every one.

    Args:
        model: the model's name.
        attempt: runs a group, and raises.
        called: the name of the model's function that an attempt calls.
        rows: the row counts that the model takes; None: it has no batch dimension.
        repeats: whether the model may be called again with so many items that it has seen.
        divides: whether rows of one request may be in different calls.
        free: gives back memory that nothing uses.
        probe: uses the device, and raises where that cannot be done any more.
        counts: where second tries are counted.
    """

    def __init__(
        self,
        model: str,
        attempt: Callable[[Group], Sequence[Outcome]],
        *,
        called: str,
        rows: Rows | None,
        repeats: Callable[[int], bool],
        divides: bool,
        free: Callable[[], None],
        probe: Callable[[], None],
        counts: Counts,
    ) -> None:
        self.reports: dict[tuple[str, str], list[int]] = {}
        self.places: Sequence[int] | None = None
        self.fatal: UnavailableError | None = None
        self.reason = ""
        self.capacity = Capacity(rows or gather_scatter.ANY_ROWS)
        self.begins: Callable[[], None] = _nothing
        self._model = model
        self._attempt = attempt
        self._called = called
        self._batched = rows is not None
        self._repeats = repeats
        self._divides = divides
        self._free = free
        self._probe = probe
        self._counts = counts

    def run(self, group: Group) -> Sequence[Outcome]:
        """The outcomes of a group whose shape memory may not suffice for."""
        if self.fatal is not None:
            return [self.fatal] * len(group.items)
        shape, sizes = _shape(group), self._sizes(group)
        most = self.capacity.most(shape) if self._batched else None
        if most is not None and sum(sizes) > most:
            before = self.capacity.remembered(shape)
            return self._in_parts(group, shape, sizes, before, Budget(_CALLS))
        result = self._try(group)
        if isinstance(result, Failure):
            return self.settle(group, result)
        self.capacity.fitted(shape, sum(sizes))
        return result

    def settle(
        self, group: Group, failure: Failure, calls: Budget | None = None
    ) -> Sequence[Outcome]:
        """The outcomes of a group that failed.

        Not to be called where the exception is being handled: the next one would carry it along.

        Args:
            group: the group.
            failure: why it failed.
            calls: those that bisections of the batch, which the group is a part of, have left;
                None: the group is the whole batch.
        """
        calls = calls or Budget(_CALLS)
        if self.fatal is None and failure.memory and self._batched:
            shape, sizes = _shape(group), self._sizes(group)
            before = self.capacity.remembered(shape)
            if self._limit(shape, sum(sizes)) and self._repeats(len(sizes)):
                self._counts.retried_rows += sum(sizes)
                return self._in_parts(group, shape, sizes, before, calls)
        final = failure.memory or failure.repeats or self.fatal is not None
        if final or len(group.items) == 1 or not self._repeats(len(group.items)):
            return self._refuse(group, failure)
        return self._narrow(group, failure, calls)

    def _narrow(self, group: Group, failure: Failure, calls: Budget) -> Sequence[Outcome]:
        members = list(zip(group.items, group.positions, strict=True))

        def attempt(some: Sequence[tuple[Item, int]]) -> Sequence[Outcome] | Failure:
            part = _regrouped(group, some)
            self._counts.retried_rows += sum(self._sizes(part))
            return self._try(part)

        found: list[Any] = narrow(
            members,
            attempt,
            failure,
            calls=calls,
            hopeless=lambda: self.fatal is not None,
        )
        for place, result in enumerate(found):
            if isinstance(result, Failure):
                (found[place],) = self.settle(_regrouped(group, [members[place]]), result, calls)
        return found

    def _in_parts(
        self,
        group: Group,
        shape: Hashable,
        sizes: Sequence[int],
        before: Limit | None,
        calls: Budget,
    ) -> list[Outcome]:
        """The outcomes of a group that is called with as many rows at a time as fit in memory.

        Args:
            group: the group.
            shape: what its limit is remembered by.
            sizes: the rows of its items.
            before: what was remembered before this group.
            calls: those that bisections of the batch have left.
        """
        pending = deque((place, 0, size) for place, size in enumerate(sizes))
        pieces: list[list[Any]] = [[] for _ in sizes]
        refused: dict[int, BackendError] = {}
        hopeless = False
        while pending:
            parts = list(_take(pending, self.capacity.most(shape)))
            some = _of_parts(group, parts, sizes)
            result = self._try(some)
            if isinstance(result, Failure) and result.memory and self.fatal is None:
                rows = sum(last - first for _, first, last in parts)
                if self._limit(shape, rows):
                    self._counts.retried_rows += rows
                    pending.extendleft(reversed(parts))
                    continue
                result = self._refuse(some, result)
                hopeless = True
            elif isinstance(result, Failure):
                result = self.settle(some, result, calls)
            for (place, _, _), outcome in zip(parts, result, strict=True):
                if isinstance(outcome, BackendError):
                    refused[place] = outcome
                else:
                    pieces[place].append(outcome)
        if hopeless:
            self.capacity.restore(shape, before)
        elif not refused:
            self.capacity.fitted(shape, sum(sizes))
        return [
            refused[place] if place in refused else self._join(found)
            for place, found in enumerate(pieces)
        ]

    def _sizes(self, group: Group) -> list[int]:
        """Return the rows of each item, or 1 for each where its rows stay together."""
        return _sizes(group) if self._divides else [1] * len(group.items)

    def _join(self, pieces: Sequence[dict[str, Value]]) -> Outcome:
        """One item's outputs, of the calls that it took."""
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

    def _try(self, group: Group) -> Sequence[Outcome] | Failure:
        if self.fatal is not None:
            return Failure(self.fatal, repeats=True)
        self.begins()
        try:
            return self._attempt(group)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return self.judge(error)

    def judge(self, error: BaseException, called: str | None = None) -> Failure:
        """Read all that is needed from an exception, and let go of it.

        Args:
            error: the exception.
            called: the name of the model's function that raised it, where it is no attempt's.
        """
        text = "".join(traceback.format_exception(error, limit=_FRAMES)).rstrip()
        memory = faults.out_of_memory(error)
        dead = self._dead(error)
        failure = self._named(error, called or self._called, memory=memory, dead=dead, text=text)
        faults.release(error)
        if memory and dead is None:
            self._free()
        return failure

    def _named(
        self,
        error: BaseException,
        called: str,
        *,
        memory: bool,
        dead: BaseException | None,
        text: str,
    ) -> Failure:
        if dead is not None:
            if self.fatal is None:
                self.reason = brief(dead)
                self.fatal = UnavailableError.fatal(self._model, self.reason)
            return Failure(self.fatal, text, repeats=True)
        if memory:
            return Failure(OutOfMemoryError(self._model), text, memory=True)
        if isinstance(error, BackendError):
            # What the config and the model disagree in, no item can help. What was raised by the
            # model's own code is told with its traceback.
            seen = text if isinstance(error, HookError) else ""
            return Failure(error, seen, repeats=isinstance(error, LoadError))
        return Failure(ForwardError(self._model, error, called), text)

    def _dead(self, error: BaseException) -> BaseException | None:
        """What has made the device useless to this process, if anything has.

        Not all runtimes pass on what CUDA said (AOTInductor does not), so the device is asked.
        """
        if faults.is_sticky(error):
            return error
        try:
            self._probe()
        except Exception as found:  # whatever a device that is gone makes torch raise
            return found
        return None

    def _limit(self, shape: Hashable, rows: int) -> bool:
        """Whether there are smaller calls than one of so many rows; they are remembered."""
        less = self.capacity.failed(shape, rows)
        if less is None:
            return False
        self._counts.memory_splits += 1
        log.warning(
            "model '%s': memory ran out with %d rows of the shapes %s; they are called with at most"
            " %d for a while.",
            self._model,
            rows,
            shape,
            less,
        )
        return True

    def _refuse(self, group: Group, failure: Failure) -> list[Outcome]:
        error = failure.error if self.fatal is None else self.fatal
        self.report(error, failure.text, group.positions)
        return [error] * len(group.items)

    def report(self, error: BackendError, text: str, positions: Sequence[int]) -> None:
        """Note what failed; what is the same for several items is told once."""
        if self.places is not None:
            positions = [self.places[position] for position in positions]
        self.reports.setdefault((str(error), text), []).extend(positions)


def _nothing() -> None: ...


def _same(value: Value) -> Value:
    return value


def _shape(group: Group) -> tuple[tuple[int, ...], ...]:
    """What memory depends on beside rows: the inputs' shapes, each as long as its longest."""
    return tuple(
        tuple(map(max, zip(*(item[name].shape[1:] for item in group.items), strict=True)))
        for name in group.inputs.names
        if name in group.items[0]  # else a batch input, which is made for each call
    )


def _sizes(group: Group) -> list[int]:
    """The rows of each item; 0 where there is no input to tell them."""
    names = group.inputs.names
    return [item[names[0]].shape[0] if names else 0 for item in group.items]


def _regrouped(group: Group, some: Sequence[tuple[Item, int]]) -> Group:
    return Group(group.inputs, [item for item, _ in some], [position for _, position in some])


def _take(pending: deque[_Part], most: int | None) -> Iterator[_Part]:
    """Parts of at most so many rows together, taken from the left; at least one."""
    room = most
    while pending and (room is None or room > 0 or pending[0][1] == pending[0][2]):
        place, first, last = pending.popleft()
        if room is not None:
            stop = min(last, first + room)
            if stop < last:
                pending.appendleft((place, stop, last))
            last = stop
            room -= last - first
        yield place, first, last


def _of_parts(group: Group, parts: Sequence[_Part], sizes: Sequence[int]) -> Group:
    items, positions = [], []
    for place, first, last in parts:
        item = group.items[place]
        whole = (first, last) == (0, sizes[place])
        # Copies, where it is alone: what is passed as it is may be written into, and tried again.
        copied = gather_scatter.own if len(parts) == 1 else _same
        items.append(
            {key: copied(value if whole else value[first:last]) for key, value in item.items()}
        )
        positions.append(group.positions[place])
    return Group(group.inputs, items, positions)
