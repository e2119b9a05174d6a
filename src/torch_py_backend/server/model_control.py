"""A client of Triton's model repository API, to load and unload models.

It uses gRPC: Triton's HTTP server processes a load on a thread that also serves other connections,
and they wait until the model is loaded. Its gRPC server uses a thread of its own for each load.
"""

from __future__ import annotations

import grpc

from torch_py_backend.errors import ServerError
from torch_py_backend.server.endpoint_restrictions import Keys

_SERVICE = "/inference.GRPCInferenceService"
_UNLOAD_S = 30.0


class LoadTimeoutError(ServerError):
    """A load was not completed in time."""


class RepositoryClient:
    """A client of the repository API of one server. Methods may be called in any thread."""

    def __init__(self, address: str, keys: Keys) -> None:
        self._channel = grpc.insecure_channel(address)
        self._metadata = keys.grpc

    def load(self, model: str, seconds: float) -> None:
        """Load a model, and wait for it.

        Raises:
            LoadTimeoutError: it took longer; Triton continues to load the model.
            ServerError: it cannot be loaded; the message says why.
        """
        self._call("RepositoryModelLoad", model, seconds)

    def unload(self, model: str) -> None:
        """Unload a model; its instances end soon after.

        Raises:
            ServerError: the server refused.
        """
        self._call("RepositoryModelUnload", model, _UNLOAD_S)

    def _call(self, method: str, model: str, seconds: float) -> None:
        # Without serializers, the channel sends bytes: a message with one field needs no protobuf.
        call = self._channel.unary_unary(f"{_SERVICE}/{method}")
        try:
            call(_message(model), timeout=seconds, metadata=self._metadata, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise LoadTimeoutError(f"it took longer than {seconds:g} s") from None
            raise ServerError(error.details() or str(error.code())) from None
        except ValueError:  # raised by grpc
            raise ServerError("the connection is closed") from None

    def close(self) -> None:
        """Close the connection; pending calls fail."""
        self._channel.close()


def _message(model: str) -> bytes:
    """Return the protobuf message of both calls: field 2, `model_name`."""
    name = model.encode()
    size, length = len(name), b""
    while size > 0x7F:  # noqa: PLR2004  seven bits a byte; the eighth marks that more follow
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return b"\x12" + length + bytes([size]) + name
