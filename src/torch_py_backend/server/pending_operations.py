"""Loads and unloads in threads of their own, whose completions go to a queue."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch_py_backend.errors import ServerError, summarize
from torch_py_backend.server import model_status
from torch_py_backend.server.tritonserver import ModelState


class ModelControl(Protocol):
    """Loads and unloads models; implemented by `model_control.RepositoryClient`."""

    def load(self, model: str, seconds: float) -> None: ...

    def unload(self, model: str) -> None: ...


@dataclass(eq=False, slots=True)
class Operation:
    """A load or an unload.

    Attributes:
        model: the model's name.
        is_load: whether this is a load.
        started: the start, in the clock's seconds.
        dependents: after an unload: the ensembles that Triton unloaded with the model.
        error: after a failure: the reason; None: the operation succeeded, or the server ended.
    """

    model: str
    is_load: bool
    started: float
    dependents: set[str] = field(default_factory=set)
    error: ServerError | None = None


class PendingOperations:
    """Starts loads and unloads, and collects the completed ones.

    Args:
        states: returns Triton's states of the models.
        control: loads and unloads models.
        spawn: runs a function in a thread of its own.
        wake: is called after each completion.
    """

    def __init__(
        self,
        states: Callable[[], Sequence[ModelState]],
        control: ModelControl,
        spawn: Callable[[Callable[[], None]], None],
        wake: Callable[[], None],
    ) -> None:
        self._states, self._control, self._spawn, self._wake = states, control, spawn, wake
        self._completed: queue.SimpleQueue[Operation] = queue.SimpleQueue()

    def load(
        self, model: str, now: float, seconds: float, dependents: Sequence[str], *, again: bool
    ) -> Operation:
        """Start to load a model.

        Args:
            model: the model's name.
            now: the clock's seconds.
            seconds: the time limit for Triton.
            dependents: the ensembles to load again with the model.
            again: whether the model was loaded before.
        """
        operation = Operation(model, is_load=True, started=now)
        self._start(operation, lambda: self._load(model, seconds, dependents, again=again))
        return operation

    def unload(self, model: str, now: float) -> Operation:
        """Start to unload a model. If that fails, the next load unloads it first."""
        operation = Operation(model, is_load=False, started=now)
        self._start(operation, lambda: self._unload(operation))
        return operation

    def completed(self) -> list[Operation]:
        """Return the operations completed since the last call."""
        operations = []
        with contextlib.suppress(queue.Empty):
            while True:
                operations.append(self._completed.get_nowait())
        return operations

    def _start(self, operation: Operation, function: Callable[[], None]) -> None:
        def run() -> None:
            try:
                function()
            except ServerError as error:
                operation.error = error
            except Exception as error:  # an unexpected response: the operation must complete
                operation.error = ServerError(summarize(error))
            self._completed.put(operation)
            self._wake()

        self._spawn(run)

    def _load(self, name: str, seconds: float, dependents: Sequence[str], *, again: bool) -> None:
        # OSError: the server ends. KeyError: an ensemble was removed. Neither is a failed load.
        with contextlib.suppress(OSError, KeyError):
            # Triton does not load a model that is READY, even if all its instances are dead.
            if again and name in model_status.ready_models(self._states()):
                self._control.unload(name)
            self._control.load(name, seconds)
            # Triton usually loads an ensemble again when the last of its models is loaded.
            for dependent in dependents:
                if not model_status.by_model(self._states())[dependent].ready:
                    self._control.load(dependent, seconds)

    def _unload(self, operation: Operation) -> None:
        with contextlib.suppress(OSError):  # the server ends
            before = model_status.ready_models(self._states())
            self._control.unload(operation.model)
            # Triton unloads the ensembles that use the model as well.
            after = model_status.ready_models(self._states())
            operation.dependents = before - after - {operation.model}
