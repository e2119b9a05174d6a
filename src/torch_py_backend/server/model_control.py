"""Loads and unloads of models through Triton's model repository API.

They use gRPC: Triton's HTTP server processes a load on a thread that also serves other
connections, and they wait until the model is loaded. Its gRPC server uses a thread of its own for
each load.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from torch_py_backend.errors import ServerError, summarize
from torch_py_backend.server import triton_installation
from torch_py_backend.server.server_arguments import Keys

_SERVICE = "/inference.GRPCInferenceService"
_UNLOAD_S = 30.0
_NOT_POLLED = "failed to poll from model repository"


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

    def load(self, model: str, seconds: float, config: str = "") -> None:
        """Load a model, and wait for it.

        Args:
            model: its name.
            seconds: the time limit.
            config: replaces its config.pbtxt, as JSON; empty: it does not.

        Raises:
            LoadTimeoutError: it took longer; Triton continues to load the model.
            ServerError: it cannot be loaded; the message says why.
        """
        if self._uses_shell:
            triton_installation.refuse_in_shell("the folder", model, "Rename it.")
        # Field 3 of the message is a map of parameters, whose values have strings in field 3.
        parameter = _field(3, _field(1, b"config") + _field(2, _field(3, config.encode())))
        try:
            self._call("RepositoryModelLoad", model, seconds, parameter if config else b"")
        except ServerError as error:
            reason = self._poll_failure(model) if _NOT_POLLED in str(error) else ""
            if reason:
                raise ServerError(reason) from None
            raise

    def unload(self, model: str) -> None:
        """Unload a model; its instances end soon after. Raise a ServerError if Triton refuses."""
        self._call("RepositoryModelUnload", model, _UNLOAD_S)

    def _call(self, method: str, model: str, seconds: float, parameters: bytes = b"") -> None:
        # Without serializers, the channel sends bytes. tritonclient, which has Triton's protobuf
        # messages, is not a requirement of `serve`.
        call = self._channel.unary_unary(f"{_SERVICE}/{method}")
        message = _field(2, model.encode()) + parameters  # 2: `model_name` of both messages
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


def _field(number: int, content: bytes) -> bytes:
    """Return a field of a protobuf message: number and type, length and content."""
    size, rest = b"", len(content)
    # The length has seven bits a byte; the eighth marks that another byte follows.
    while rest >> 7:
        size, rest = size + bytes([rest & 0x7F | 0x80]), rest >> 7
    return bytes([number << 3 | 2]) + size + bytes([rest]) + content


@dataclass(eq=False, slots=True)
class Operation:
    """A load or an unload in a thread of its own.

    Attributes:
        started: when it began, by the supervisor's clock.
        config: the model's config before an unload, or after a load; empty: unknown.
        error: after a failure: the reason; None: the operation succeeded.
        done: whether it has ended. Set last.
    """

    started: float
    config: str = ""
    error: ServerError | None = None
    done: bool = False

    def run(self, function: Callable[[], None], wake: Callable[[], None]) -> None:
        """Run a function, note its error, and then call `wake`."""
        try:
            function()
        except ServerError as error:
            self.error = error
        except OSError:
            self.error = ServerError("tritonserver does not answer")
        except Exception as error:  # an unexpected response: the operation must complete
            self.error = ServerError(summarize(error))
        self.done = True
        wake()


def start_daemon(function: Callable[[], None]) -> None:
    """Run a function in a thread that does not delay the end of this process."""
    threading.Thread(target=function, daemon=True).start()
