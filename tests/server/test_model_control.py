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
from torch_py_backend.server.model_control import Control, TooLongError


class _Triton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Notes what it is asked, and refuses the model `broken`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str]]] = []

    def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802  Triton's name
        return self._answer("load", request, context, service_pb2.RepositoryModelLoadResponse())

    def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: N802  Triton's name
        return self._answer("unload", request, context, service_pb2.RepositoryModelUnloadResponse())

    def _answer(self, what: str, request: Any, context: Any, answer: Any) -> Any:
        sent = {key: value for key, value in context.invocation_metadata() if "triton" in key}
        self.asked.append((what, request.model_name, sent))
        if request.model_name == "broken":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "load failed")
        if request.model_name == "endless":
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "")
        return answer


@pytest.fixture
def triton() -> Iterator[tuple[_Triton, str]]:
    """A server of Triton's protocol, and its address."""
    asked = _Triton()
    served = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(asked, served)
    port = served.add_insecure_port("127.0.0.1:0")
    served.start()
    yield asked, f"127.0.0.1:{port}"
    served.stop(None).wait()


@pytest.mark.parametrize("name", ["m", "a" * 127, "b" * 128, "grüße" * 40])
def test_the_name_arrives(name: str, triton: tuple[_Triton, str]) -> None:
    """Names of any length are told apart by Triton's own protobuf, and the keys come along."""
    asked, address = triton
    control = Control(address, Keys(grpc=(("triton-grpc-protocol-key", "v"),)))
    control.load(name, 30)
    control.unload(name)
    control.close()
    sent = {"triton-grpc-protocol-key": "v"}
    assert asked.asked == [("load", name, sent), ("unload", name, sent)]


def test_a_refusal(triton: tuple[_Triton, str]) -> None:
    """Triton's reason is the error's text; a load that never ends is told apart."""
    control = Control(triton[1], Keys())
    with pytest.raises(ServerError, match=r"^load failed$"):
        control.load("broken", 30)
    with pytest.raises(TooLongError, match="took longer than 30 s"):
        control.load("endless", 30)
    control.close()
    with pytest.raises(ServerError, match="closed"):
        control.unload("m")
