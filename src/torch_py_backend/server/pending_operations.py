"""Loads and unloads, which may take long: each in a thread of its own, its end told by a queue."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch_py_backend.errors import ServerError, brief
from torch_py_backend.server import model_status
from torch_py_backend.server.tritonserver import ModelState


class Control(Protocol):
    """What is done to a server: see `control.Control`."""

    def load(self, model: str, seconds: float) -> None: ...

    def unload(self, model: str) -> None: ...


@dataclass(eq=False, slots=True)
class Work:
    """A load or an unload on its way.

    Attributes:
        model: of which model.
        loads: which of the two.
        started: when, in the clock's seconds.
        dependents: once it has ended: the ensembles that Triton unloaded with the model.
        error: once it has ended: why it failed; None: it did not, or the server has gone.
    """

    model: str
    loads: bool
    started: float
    dependents: set[str] = field(default_factory=set)
    error: ServerError | None = None


class Operations:
    """Starts loads and unloads.

    Args:
        states: Triton's states of its models.
        control: loads and unloads.
        spawn: runs a function in a thread of its own.
        wake: called at each end.
    """

    def __init__(
        self,
        states: Callable[[], Sequence[ModelState]],
        control: Control,
        spawn: Callable[[Callable[[], None]], None],
        wake: Callable[[], None],
    ) -> None:
        self._states, self._control, self._spawn, self._wake = states, control, spawn, wake
        self._done: queue.SimpleQueue[Work] = queue.SimpleQueue()

    def load(
        self, model: str, now: float, seconds: float, dependents: Sequence[str], *, again: bool
    ) -> Work:
        """Start a load.

        Args:
            model: of which model.
            now: the clock's seconds.
            seconds: how long Triton is given for it.
            dependents: ensembles that are to serve again with it.
            again: it was loaded before.
        """
        work = Work(model, loads=True, started=now)
        self._start(work, lambda: self._load(model, seconds, dependents, again=again))
        return work

    def unload(self, model: str, now: float) -> Work:
        """Start an unload. If it fails, the load after it will try once more."""
        work = Work(model, loads=False, started=now)
        self._start(work, lambda: self._unload(work))
        return work

    def ended(self) -> list[Work]:
        """What has ended since the last time."""
        done = []
        with contextlib.suppress(queue.Empty):
            while True:
                done.append(self._done.get_nowait())
        return done

    def _start(self, work: Work, does: Callable[[], None]) -> None:
        def run() -> None:
            try:
                does()
            except ServerError as failure:
                work.error = failure
            except Exception as failure:  # an answer like no other: whoever waits must be told
                work.error = ServerError(brief(failure))
            self._done.put(work)
            self._wake()

        self._spawn(run)

    def _load(self, name: str, seconds: float, dependents: Sequence[str], *, again: bool) -> None:
        # The server ends, or an ensemble is gone: not for us to tell.
        with contextlib.suppress(OSError, KeyError):
            # To load what Triton calls READY does nothing: not even if all its instances are dead.
            if again and name in model_status.ready(self._states()):
                self._control.unload(name)
            self._control.load(name, seconds)
            # Triton loads ensembles again when the last of their models is there; most of the time.
            for dependent in dependents:
                if not model_status.views(self._states())[dependent].ready:
                    self._control.load(dependent, seconds)

    def _unload(self, work: Work) -> None:
        with contextlib.suppress(OSError):  # the server ends
            before = model_status.ready(self._states())
            self._control.unload(work.model)
            # Triton takes ensembles of it along, and calls them unloaded, too.
            work.dependents = before - model_status.ready(self._states()) - {work.model}
