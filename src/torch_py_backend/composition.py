"""Other models of the same server, called from within a model: from forward(), or from hooks.

    from torch_py_backend.composition import model

    logits = model("digits")(image=image)["logits"]

Where there is no server (in `check`, in a test), `stand_in` says what is called instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch_py_backend.config.request_parameters import Parameters
from torch_py_backend.errors import NoServerError

# What a model gives: tensors by name; strings are arrays of bytes.
Results: TypeAlias = "dict[str, Any]"


@dataclass(frozen=True, slots=True)
class Model:
    """A model of this server.

    Attributes:
        name: its name.
        version: its version; None: the one that Triton chooses.
        timeout: seconds that an answer may take; None: as long as it does.
        parameters: what goes with each request beside the inputs.
    """

    name: str
    version: int | None = None
    timeout: float | None = None
    parameters: Parameters = field(default_factory=dict)

    def __call__(self, /, **inputs: Any) -> Results:
        """The model's outputs by name.

        Args:
            inputs: tensors, arrays, numbers, or lists of str or bytes, by the names of the model's
                inputs, with the batch dimension where it has one.

        Raises:
            CallError: the model is not there, refuses the inputs, fails, or takes too long.
        """
        return _transport.send(self, inputs)

    async def asynchronously(self, /, **inputs: Any) -> Results:
        """As a call, for use with asyncio: several models may work at the same time.

        Raises:
            CallError: as for a call.
        """
        return await _transport.send_async(self, inputs)


model = Model


class Transport(Protocol):
    """Who brings calls to their model."""

    def send(self, called: Model, inputs: Mapping[str, Any]) -> Results: ...

    async def send_async(self, called: Model, inputs: Mapping[str, Any]) -> Results: ...


class _Nowhere:
    """Where there is no server."""

    def send(self, called: Model, inputs: Mapping[str, Any]) -> Results:
        raise NoServerError(called.name, list(inputs))

    async def send_async(self, called: Model, inputs: Mapping[str, Any]) -> Results:
        return self.send(called, inputs)


@dataclass(frozen=True, slots=True)
class _StandIns:
    """Functions in the place of models."""

    functions: Mapping[str, Callable[..., Results]]

    def send(self, called: Model, inputs: Mapping[str, Any]) -> Results:
        if called.name not in self.functions:
            raise NoServerError(called.name, list(inputs))
        return self.functions[called.name](**inputs)

    async def send_async(self, called: Model, inputs: Mapping[str, Any]) -> Results:
        return self.send(called, inputs)


_transport: Transport = _Nowhere()


def connect(transport: Transport) -> None:
    """Let calls go this way; what runs in a server does so when its model is ready."""
    global _transport  # noqa: PLW0603  one process is one instance of one model
    _transport = transport


@contextlib.contextmanager
def stand_in(functions: Mapping[str, Callable[..., Results]]) -> Iterator[None]:
    """Let functions answer in the place of models: for tests of a model that calls others.

    Args:
        functions: by the names of the models; each takes the inputs by their names, and returns a
            dict of outputs.
    """
    before = _transport
    connect(_StandIns(functions))
    try:
        yield
    finally:
        connect(before)
