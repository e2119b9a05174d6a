"""Loads and unloads of models through Triton's model repository API.

They use gRPC: Triton's HTTP server processes a load on a thread that also serves other
connections, and they wait until the model is loaded. Its gRPC server uses a thread of its own for
each load. Here, no thread waits for the answer: both methods return a future, which is polled.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import grpc

from torch_py_backend.errors import ServerError
from torch_py_backend.server import triton_installation
from torch_py_backend.server.server_arguments import Keys

_SERVICE = "/inference.GRPCInferenceService"
_UNLOAD_S = 30.0
_NOT_POLLED = "failed to poll from model repository"


class LoadTimeoutError(ServerError):
    """A load was not completed in time."""


class RepositoryClient:
    """A client of the repository API of one server.

    The futures that it returns fail with a LoadTimeoutError if Triton took longer, in which case it
    continues, and otherwise with a ServerError, which says why.

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

    def load(self, model: str, seconds: float, config: str = "") -> Future[None]:
        """Begin to load a model.

        Args:
            model: its name.
            seconds: the time limit.
            config: replaces its config.pbtxt, as JSON; empty: it does not.
        """
        if self._uses_shell:
            try:
                triton_installation.refuse_in_shell("the folder", model, "Rename it.")
            except ServerError as error:
                return failed(error)
        # Field 3 of the message is a map of parameters, whose values have strings in field 3.
        parameter = _field(3, _field(1, b"config") + _field(2, _field(3, config.encode())))
        return self._call("RepositoryModelLoad", model, seconds, parameter if config else b"")

    def unload(self, model: str) -> Future[None]:
        """Begin to unload a model; its instances end soon after."""
        return self._call("RepositoryModelUnload", model, _UNLOAD_S)

    def _call(
        self, method: str, model: str, seconds: float, parameters: bytes = b""
    ) -> Future[None]:
        # Without serializers, the channel sends bytes. tritonclient, which has Triton's protobuf
        # messages, is not a requirement of `serve`.
        send = self._channel.unary_unary(f"{_SERVICE}/{method}")
        message = _field(2, model.encode(errors="replace")) + parameters  # 2: `model_name`
        result: Future[None] = Future()

        def complete(call: grpc.Future) -> None:
            if call.code() is grpc.StatusCode.OK:
                result.set_result(None)
            elif call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                result.set_exception(LoadTimeoutError(f"it took longer than {seconds:g} s"))
            else:
                reason = call.details() or str(call.code())
                known = self._poll_failure(model) if _NOT_POLLED in reason else ""
                result.set_exception(ServerError(known or reason))

        try:
            call = send.future(
                message, timeout=seconds, metadata=self._metadata, wait_for_ready=True
            )
        except ValueError:  # raised by grpc
            return failed(ServerError("the connection is closed"))
        call.add_done_callback(complete)
        return result

    def close(self) -> None:
        """Close the connection; pending calls fail."""
        self._channel.close()


def failed(error: ServerError) -> Future[None]:
    """Return the future of a call that could not be sent."""
    future: Future[None] = Future()
    future.set_exception(error)
    return future


def _field(number: int, content: bytes) -> bytes:
    """Return a field of a protobuf message: number and type, length and content."""
    size, rest = b"", len(content)
    # The length has seven bits a byte; the eighth marks that another byte follows.
    while rest >> 7:
        size, rest = size + bytes([rest & 0x7F | 0x80]), rest >> 7
    return bytes([number << 3 | 2]) + size + bytes([rest]) + content
