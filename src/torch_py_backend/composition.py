"""Calls of other models of the same server, from forward() or from hooks.

    from torch_py_backend.composition import model

    logits = model("digits")(image=image)["logits"]

Without a server (in `check` or in a test), `stand_in` replaces models by functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torch_py_backend.errors import CallError, join_names

if TYPE_CHECKING:  # the border: no torch before an instance has set its threads
    from torch_py_backend.values import Parameters

# The outputs of a model: tensors by name; strings are arrays of bytes.
Results: TypeAlias = "dict[str, Any]"
Inputs: TypeAlias = "Mapping[str, object]"


@dataclass(frozen=True, slots=True)
class Model:
    """A model of this server.

    Attributes:
        version: its version; None: Triton chooses it.
        parameters: the parameters of each request.
    """

    name: str
    version: int | None = None
    parameters: Parameters = field(default_factory=dict)

    def __call__(self, /, **inputs: object) -> Results:
        """Call the model and return its outputs by name.

        Args:
            inputs: tensors, arrays, numbers, or lists of str or bytes, by input name, with the
                batch dimension if the model has one.

        Raises:
            CallError: the model does not exist, refuses the inputs, or fails.
        """
        global calls  # noqa: PLW0603  one process is one instance of one model
        calls += 1
        return send(self, inputs)


model = Model
# The number of calls so far. A batch that has called other models is not run again.
calls = 0


def _refuse(called: Model, inputs: Inputs) -> Results:
    raise CallError(
        called.name,
        f"it was called with {join_names(inputs) or 'no inputs'} where no server executes"
        " requests: while a model loads, in `check`, or in a test",
        cure="In a test, replace the model with torch_py_backend.composition.stand_in.",
    )


# Sends a call to its model. An instance replaces it when its own model is ready.
send: Callable[[Model, Inputs], Results] = _refuse


@contextlib.contextmanager
def stand_in(functions: Mapping[str, Callable[..., Results]]) -> Iterator[None]:
    """Replace models by functions, in tests of a model that calls others.

    Args:
        functions: functions by the names of the models. Each takes the inputs as keyword arguments
            and returns a dict of outputs.
    """
    global send  # noqa: PLW0603  as `calls`
    before = send

    def call(called: Model, inputs: Inputs) -> Results:
        if called.name in functions:
            return functions[called.name](**inputs)
        return before(called, inputs)

    send = call
    try:
        yield
    finally:
        send = before
