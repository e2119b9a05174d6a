"""Loads and unloads over gRPC, against a server that only listens; tests/live has real ones."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from torch_py_backend.errors import ServerError
from torch_py_backend.server.endpoint_restrictions import Keys
from torch_py_backend.server.model_control import LoadTimeoutError, RepositoryClient


class _Triton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Notes what it is requests, and refuses the model `broken`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str]]] = []

    def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802  Triton's name
        return self._answer("load", request, context, service_pb2.RepositoryModelLoadResponse())

    def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: N802  Triton's name
        return self._answer("unload", request, context, service_pb2.RepositoryModelUnloadResponse())

    def _answer(self, what: str, request: Any, context: Any, answer: Any) -> Any:
        sent = {key: value for key, value in context.invocation_metadata() if "triton" in key}
        self.requests.append((what, request.model_name, sent))
        if request.model_name == "broken":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "load failed")
        if request.model_name == "endless":
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "")
        return answer


@pytest.fixture
def triton() -> Iterator[tuple[_Triton, str]]:
    """A server of Triton's protocol, and its address."""
    requests = _Triton()
    served = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(requests, served)
    port = served.add_insecure_port("127.0.0.1:0")
    served.start()
    yield requests, f"127.0.0.1:{port}"
    served.stop(None).wait()


@pytest.mark.parametrize("name", ["m", "a" * 127, "b" * 128, "grüße" * 40])
def test_the_name_arrives(name: str, triton: tuple[_Triton, str]) -> None:
    """Names of any length are told apart by Triton's own protobuf, and the keys come along."""
    requests, address = triton
    client = RepositoryClient(address, Keys(grpc=(("triton-grpc-protocol-key", "v"),)))
    client.load(name, 30)
    client.unload(name)
    client.close()
    sent = {"triton-grpc-protocol-key": "v"}
    assert requests.requests == [("load", name, sent), ("unload", name, sent)]


def test_a_refusal(triton: tuple[_Triton, str]) -> None:
    """Triton's reason is the error's text; a load that never ends is told apart."""
    client = RepositoryClient(triton[1], Keys())
    with pytest.raises(ServerError, match=r"^load failed$"):
        client.load("broken", 30)
    with pytest.raises(LoadTimeoutError, match="took longer than 30 s"):
        client.load("endless", 30)
    client.close()
    with pytest.raises(ServerError, match="closed"):
        client.unload("m")
