"""Models loaded and unloaded on a running server.

Over gRPC: Triton's HTTP server answers a load on the thread that serves other connections too, and
they wait until the model is loaded. Its gRPC server gives each load a thread of its own.
"""

from __future__ import annotations

import grpc

from torch_py_backend.errors import ServerError
from torch_py_backend.server.endpoint_restrictions import Keys

_SERVICE = "/inference.GRPCInferenceService"
_UNLOAD_S = 30.0


class TooLongError(ServerError):
    """A load has not answered in time."""


class Control:
    """The repository API of one server, over gRPC. Every method may be called in any thread."""

    def __init__(self, address: str, sent: Keys) -> None:
        self._channel = grpc.insecure_channel(address)
        self._metadata = sent.grpc

    def load(self, model: str, seconds: float) -> None:
        """Load a model, and wait for it.

        Raises:
            TooLongError: it took longer; Triton still tries.
            ServerError: it cannot be loaded; the message says why.
        """
        self._ask("RepositoryModelLoad", model, seconds)

    def unload(self, model: str) -> None:
        """Take a model out of service; its instances end soon after.

        Raises:
            ServerError: the server did not do it.
        """
        self._ask("RepositoryModelUnload", model, _UNLOAD_S)

    def _ask(self, method: str, model: str, seconds: float) -> None:
        # Without serializers a channel takes bytes: one field needs no generated code.
        call = self._channel.unary_unary(f"{_SERVICE}/{method}")
        try:
            call(_named(model), timeout=seconds, metadata=self._metadata, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TooLongError(f"it took longer than {seconds:g} s") from None
            raise ServerError(error.details() or str(error.code())) from None
        except ValueError:  # grpc's word for it
            raise ServerError("the connection is closed") from None

    def close(self) -> None:
        """Give the connection back; calls that still wait fail."""
        self._channel.close()


def _named(model: str) -> bytes:
    """The message of both calls in protobuf's encoding: field 2, `model_name`."""
    name = model.encode()
    size, length = len(name), b""
    while size > 0x7F:  # noqa: PLR2004  a byte holds seven bits and "more to come"
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return b"\x12" + length + bytes([size]) + name
