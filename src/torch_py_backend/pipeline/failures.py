"""What follows a failed call: its halves are run until only failing requests have the error."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torch_py_backend import composition
from torch_py_backend.errors import (
    BackendError,
    ForwardError,
    InputError,
    InternalError,
    OutOfMemoryError,
    UnavailableError,
    summarize,
)
from torch_py_backend.values import Call, Item, Tree, trace_context

# The most calls for one failed batch: enough for 64 items.
MAX_CALLS = 128
_SHORTAGE = re.compile(
    r"out of memory|\balloc_cpu\b|\bbad_alloc\b|_ALLOC(ATION)?_FAILED"
    # The first use of cuBLAS creates a handle with a workspace. If that does not fit in memory,
    # cublasCreate reports that the library is not initialized.
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(Lt)?Create"
)

T = TypeVar("T")
R = TypeVar("R")
E = TypeVar("E", bound=BackendError)


def reported(error: E, text: str = "") -> E:
    """Return the error of a request, marked for the log with the traceback of its cause."""
    error.reported, error.traceback = True, text
    return error


class Failures:
    """The failures of one model's calls.

    Attributes:
        fatal: the error of every request once the process cannot use its device; else None.
        calls_before: `composition.calls` before the last call.
        on_call: called before each call, which has a time limit of its own.
        on_fatal: called with the cause in a few words when `fatal` is set.

    Args:
        called: the name of the model's function, for messages.
        owner: the module with the model's buffers; None: they are not accessible.
        repeats: whether failed items are run again; None: unless the model has written to its
            buffers, or the failed call has called other models.
    """

    def __init__(
        self,
        called: str,
        *,
        device: torch.device,
        owner: nn.Module | None = None,
        repeats: bool | None = None,
    ) -> None:
        self.fatal: UnavailableError | None = None
        self.calls_before = 0
        self.on_call: Callable[[], None] = lambda: None
        self.on_fatal: Callable[[str], None] = lambda _: None
        self._called = called
        self._device = device
        self._owner = owner
        self._repeats = repeats
        self.reset()

    def reset(self) -> None:
        """Take the present buffers as the baseline: first calls may fill tables or learn sizes."""
        self._buffers = self._versions()

    def writes_buffers(self) -> bool:
        """Return whether a buffer has changed since `reset`."""
        return self._versions() != self._buffers

    def _versions(self) -> list[tuple[int, int]]:
        buffers = self._owner.buffers() if self._owner is not None else ()
        return [version(buffer) for buffer in buffers]

    def isolate(
        self,
        items: Sequence[T],
        attempt: Callable[[Sequence[T], bool], Sequence[R]],
        called: str | None = None,
    ) -> Sequence[R | BackendError]:
        """Return a result or an error for each item; run the halves of a failed range again.

        `attempt` runs a range of items; its second argument says whether it is run again. The
        larger ranges come first, until each failed one has a single item. k failing items of n take
        at most 2 k log2(n) further calls, and never more than MAX_CALLS; undecided items keep the
        failure of their range.
        """
        results: list[Any] = [self.fatal] * len(items)
        ranges = deque([(0, len(items))])
        left = 1 + MAX_CALLS
        while ranges and left and self.fatal is None:
            first, last = ranges.popleft()
            again = last - first < len(items)
            self.on_call()
            left -= 1
            self.calls_before = composition.calls
            try:
                outcomes = attempt(items[first:last], again)
                if not again:
                    return outcomes
                results[first:last] = outcomes
            except KeyboardInterrupt:  # of `check` or `tune`
                raise
            except BaseException as error:
                failure = self.classify(error, called)
                results[first:last] = [failure] * (last - first)
                if last - first > 1 and not failure.final and self._may_repeat():
                    middle = (first + last) // 2
                    ranges += (first, middle), (middle, last)
        return [(self.fatal or one) if isinstance(one, BackendError) else one for one in results]

    def _may_repeat(self) -> bool:
        """Return whether items may be run again; they are unchanged, as a batch is a copy."""
        if self._repeats is not None:
            return self._repeats
        with contextlib.suppress(Exception):  # such as no memory to read them
            before, self._buffers = self._buffers, self._versions()
            return before == self._buffers
        return False

    def classify(
        self,
        error: BaseException,
        called: str | None = None,
    ) -> BackendError:
        """Return the error of requests for an exception that the function `called` raised.

        Its frames are released. It never raises.
        """
        found: BackendError
        try:
            text = "".join(traceback.format_exception(error)).rstrip()
            try:
                probe(self._device)
            except Exception as cause:  # torch raises many classes for a lost device
                self.poison(summarize(cause), text)
            is_memory = out_of_memory(error)
            release(error)
            if self.fatal is not None:
                found = self.fatal
            elif is_memory:
                torch.cuda.empty_cache()
                found = reported(OutOfMemoryError(), text)
            elif not isinstance(error, BackendError):
                found = reported(ForwardError(error, called or self._called), text)
            elif isinstance(error, InputError):
                found = error
            else:  # only errors of the user's own code have a cause, and need a traceback
                found = reported(error, text if error.__cause__ is not None else "")
            # Other models would get the rows twice.
            calls = composition.calls != self.calls_before and not self._repeats
            found.final |= found is self.fatal or calls
        except BaseException as second:  # such as no memory for the traceback
            found = reported(InternalError(), summarize(second))
            found.final = True
        return found

    def guarded(self, item: Item, function: Call, *args: object) -> Tree:
        """Return the result of a function in the trace context of a request, or its error."""
        try:
            with trace_context((item,)):
                return function(*args)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return self.classify(error)

    def instead(
        self,
        error: BackendError,
        cause: BaseException,
    ) -> BackendError:
        """Return the error of a request, or what its cause means: no memory, or no device."""
        error.__cause__ = cause
        return self.classify(error)

    def unreadable(self, cause: Exception) -> BackendError:
        """Return the error of a request that cannot be read, due to its client or the device."""
        return self.instead(InputError(f"the request cannot be read: {summarize(cause)}"), cause)

    def poison(self, reason: str, text: str = "") -> UnavailableError:
        """Refuse every request from now on; return the error, the first one if there is one."""
        if self.fatal is None:
            error = UnavailableError(
                f"this instance met a fatal error and answers no requests any more ({reason})",
                cure="It must be replaced: reload the model.",
            )
            self.fatal = reported(error, text)
            self.on_fatal(reason)
        return self.fatal


def version(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's address and version; an inference tensor has a hash of its values."""
    is_strided = tensor.layout is torch.strided  # a sparse tensor has no address
    address = tensor.data_ptr() if is_strided else id(tensor)
    if not (tensor.is_inference() and is_strided):
        return address, 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
    # contiguous() keeps a stride of 0 of a tensor with one value.
    values = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return address, hash(values.view(torch.uint8).cpu().numpy().tobytes())


def out_of_memory(error: BaseException) -> bool:
    """Return whether device or host memory ran out.

    Many libraries say so only in the message of a RuntimeError. A message may contain text of a
    client, so no more may depend on this than the code of the client's own error.
    """
    return any(
        isinstance(link, torch.OutOfMemoryError | MemoryError)
        or (isinstance(link, RuntimeError) and _SHORTAGE.search(str(link)) is not None)
        for link in _chain(error)
    )


def release(error: BaseException) -> None:
    """Clear the frames of an exception: a retry needs the memory of what forward() has computed."""
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None


def _chain(error: BaseException) -> list[BaseException]:
    """Return the exception and its causes, or contexts; those of a cycle once."""
    links = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or link.__context__
    return links


def probe(device: torch.device) -> None:
    """Synchronize with the GPUs that this process uses; RuntimeError if one is unusable."""
    if not torch.cuda.is_initialized():
        return
    for index in range(torch.cuda.device_count()):
        # Synchronizing with an unused device, even the current one, would allocate memory on it.
        if torch.device("cuda", index) == device or torch.cuda.memory_reserved(index):
            torch.cuda.synchronize(index)
