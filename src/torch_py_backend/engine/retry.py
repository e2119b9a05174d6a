"""Retries of a failed batch: its halves are run until only failing requests have the error."""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from torch_py_backend import composition
from torch_py_backend.batching import runtime
from torch_py_backend.batching.counters import Counts
from torch_py_backend.batching.gather_scatter import Item, Outcome
from torch_py_backend.batching.grouping import Group
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine import faults
from torch_py_backend.engine.bisection import bisect
from torch_py_backend.errors import (
    BackendError,
    ForwardError,
    HookError,
    InputError,
    LoadError,
    OutOfMemoryError,
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
        repeats: whether no item is run again: every one would fail with this error, or the failed
            call has called other models, which would get its rows twice.
    """

    error: BackendError
    text: str = ""
    repeats: bool = False


class Attempt(Protocol):
    """Runs a group as one batch, under the model's guard; raises whatever the model raises."""

    def __call__(self, group: Group, *, copy_outputs: bool) -> Sequence[Outcome]:
        """Run the group.

        With `copy_outputs`, the model may be called again before the outcomes are sent. They are
        copies: a model may return views of memory that its next call overwrites.
        """


class RetryPolicy:
    """Retries failed batches of one model.

    Attributes:
        fatal: the error for every request once the process cannot use its device; else None.
        reason: the cause of `fatal` in a few words.
        on_call: called before each call, which then gets a time limit of its own.
        calls_before: `composition.calls` before the last attempt.

    Args:
        attempt: runs a group.
        called: the name of the model's function that an attempt calls.
        repeats: returns whether the model may be called again with items that were passed to it.
        device: the device that is probed after a failure.
    """

    def __init__(
        self,
        config: ModelConfig,
        attempt: Attempt,
        *,
        called: str,
        repeats: Callable[[], bool],
        device: torch.device,
        counts: Counts,
    ) -> None:
        self.fatal: UnavailableError | None = None
        self.reason = ""
        self.on_call: Callable[[], None] = lambda: None
        self.calls_before = 0
        self._retries_all = config.options.retry_failed_batch
        self._model = config.name
        self._attempt = attempt
        self._called = called
        self._repeats = repeats
        self._batched = config.max_batch_size > 0 and not config.concatenates
        self._device = device
        self._counts = counts

    def retry_or_refuse(self, group: Group, failure: Failure) -> Sequence[Outcome]:
        """Return the outcomes of a group that failed: retry it or refuse it.

        A single item is not run again. Do not call this in an except block: the next exception
        would keep the handled one as its context.
        """
        places = range(len(group.items))

        def attempt(half: Sequence[int]) -> Sequence[Outcome] | Failure:
            items = [group.items[place] for place in half]
            self._counts.retried_rows += sum(self._rows(group, item) for item in items)
            return self._try(Group(group.inputs, items, [group.positions[place] for place in half]))

        results: Sequence[Outcome | Failure] = [failure] * len(places)
        final = failure.repeats or self.fatal is not None
        if len(places) > 1 and not final and self._repeats():
            results = bisect(places, attempt, failure, hopeless=lambda: self.fatal is not None)
        return [
            self.refusal(result) if isinstance(result, Failure) else result for result in results
        ]

    def _rows(self, group: Group, item: Item) -> int:
        """Return an item's rows; 1 where the rows of an item stay together."""
        names = group.inputs.names
        return item[names[0]].shape[0] if self._batched and names else 1

    def _try(self, group: Group) -> Sequence[Outcome] | Failure:
        if self.fatal is not None:
            return Failure(self.fatal, repeats=True)
        self.on_call()
        self.calls_before = composition.calls
        try:
            return self._attempt(group, copy_outputs=True)
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
            failure = Failure(OutOfMemoryError(self._model), text)
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

    def unreadable(self, error: Exception) -> BackendError:
        """Return the error of a request that cannot be read, due to its client or the device."""
        reason, failure = summarize(error), self.classify(error)
        if self.fatal is not None or isinstance(failure.error, OutOfMemoryError):
            return self.refusal(failure)
        return InputError(self._model, f"the request cannot be read: {reason}")

    def refusal(self, failure: Failure) -> BackendError:
        """Return the error of a failure, marked for the log unless its client caused it.

        Return `fatal` once there is that.
        """
        if self.fatal is None and isinstance(failure.error, InputError):
            return failure.error
        return self.fatal or reported(failure.error, failure.text)
