"""Loads and unloads of models through Triton's model repository API.

They use gRPC: Triton's HTTP server processes a load on a thread that also serves other
connections, and they wait until the model is loaded. Its gRPC server uses a thread of its own for
each load.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from torch_py_backend.errors import ServerError, summarize
from torch_py_backend.server import model_status, triton_installation
from torch_py_backend.server.model_status import ModelState
from torch_py_backend.server.server_arguments import Keys

_SERVICE = "/inference.GRPCInferenceService"
_UNLOAD_S = 30.0
_NOT_POLLED = "failed to poll from model repository"

States = Callable[[], Sequence[ModelState]]


class LoadTimeoutError(ServerError):
    """A load was not completed in time."""


class RepositoryClient:
    """A client of the repository API of one server. Methods may be called in any thread.

    Args:
        uses_shell: whether Triton starts the processes of models through a shell.
        poll_failure: returns why Triton could not read a model's folder, which its error does not
            say; empty: unknown.
    """

    def __init__(
        self,
        address: str,
        keys: Keys,
        *,
        uses_shell: bool = False,
        poll_failure: Callable[[str], str] = lambda _model: "",
    ) -> None:
        self._channel = grpc.insecure_channel(address)
        self._metadata = keys.grpc
        self._uses_shell, self._poll_failure = uses_shell, poll_failure

    def load(self, model: str, seconds: float) -> None:
        """Load a model, and wait for it.

        Raises:
            LoadTimeoutError: it took longer; Triton continues to load the model.
            ServerError: it cannot be loaded; the message says why.
        """
        if self._uses_shell:
            triton_installation.refuse_in_shell("the folder", model, "Rename it.")
        try:
            self._call("RepositoryModelLoad", model, seconds)
        except ServerError as error:
            reason = self._poll_failure(model) if _NOT_POLLED in str(error) else ""
            if reason:
                raise ServerError(reason) from None
            raise

    def unload(self, model: str) -> None:
        """Unload a model; its instances end soon after. Raise a ServerError if Triton refuses."""
        self._call("RepositoryModelUnload", model, _UNLOAD_S)

    def _call(self, method: str, model: str, seconds: float) -> None:
        # Without serializers, the channel sends bytes. tritonclient, which has Triton's protobuf
        # messages, is not a requirement of `serve`.
        call = self._channel.unary_unary(f"{_SERVICE}/{method}")
        name = model.encode()
        # Field 2 of both messages is `model_name`. Its length has seven bits a byte; the eighth
        # marks that another byte follows.
        low, high = len(name) & 0x7F, len(name) >> 7
        message = b"\x12" + bytes([low | 0x80, high] if high else [low]) + name
        try:
            call(message, timeout=seconds, metadata=self._metadata, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise LoadTimeoutError(f"it took longer than {seconds:g} s") from None
            raise ServerError(error.details() or str(error.code())) from None
        except ValueError:  # raised by grpc
            raise ServerError("the connection is closed") from None

    def close(self) -> None:
        """Close the connection; pending calls fail."""
        self._channel.close()


@dataclass(eq=False, slots=True)
class Operation:
    """A load or an unload in a thread of its own.

    Attributes:
        started: when it began, by the supervisor's clock.
        dependents: after an unload: the ensembles that Triton unloaded with the model.
        error: after a failure: the reason; None: the operation succeeded, or the server ended.
        done: whether it has ended. Set last.
    """

    started: float
    dependents: set[str] = field(default_factory=set)
    error: ServerError | None = None
    done: bool = False

    def run(self, function: Callable[[], None], wake: Callable[[], None]) -> None:
        """Run a function, note its error, and then call `wake`."""
        try:
            function()
        except (OSError, KeyError):
            pass  # the server ends, or an ensemble was removed: neither is a failed load
        except ServerError as error:
            self.error = error
        except Exception as error:  # an unexpected response: the operation must complete
            self.error = ServerError(summarize(error))
        self.done = True
        wake()


def start_daemon(function: Callable[[], None]) -> None:
    """Run a function in a thread that does not delay the end of this process."""
    threading.Thread(target=function, daemon=True).start()


def load(
    states: States,
    control: RepositoryClient,
    model: str,
    seconds: float,
    dependents: Sequence[str],
    *,
    again: bool,
) -> None:
    """Load a model, and the ensembles that Triton unloaded with it: its dependents."""
    # Triton does not load a model that is READY, even if all its instances are dead.
    if again and model in _ready(states):
        control.unload(model)
    control.load(model, seconds)
    # Triton usually reloads an ensemble when the last of its models is loaded.
    for dependent in dependents:
        if not model_status.by_model(states())[dependent].ready:
            control.load(dependent, seconds)


def unload(states: States, control: RepositoryClient, model: str) -> set[str]:
    """Unload a model; return the ensembles that Triton unloaded with it."""
    before = _ready(states)
    control.unload(model)
    return before - _ready(states) - {model}


def _ready(states: States) -> set[str]:
    return {state.name for state in states() if state.ready}
