"""Loads and unloads over gRPC; tests/live has real servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from torch_py_backend.errors import ServerError
from torch_py_backend.server.model_control import LoadTimeoutError, RepositoryClient
from torch_py_backend.server.server_arguments import Keys


class _Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Records requests, and refuses the model `broken`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str]]] = []

    def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802  Triton's name
        return self._answer("load", request, context, service_pb2.RepositoryModelLoadResponse())

    def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: N802  Triton's name
        return self._answer("unload", request, context, service_pb2.RepositoryModelUnloadResponse())

    def _answer(self, method: str, request: Any, context: Any, answer: Any) -> Any:
        keys = {key: value for key, value in context.invocation_metadata() if "triton" in key}
        for name, value in getattr(request, "parameters", {}).items():
            keys[name] = value.string_param
        self.requests.append((method, request.model_name, keys))
        if request.model_name == "broken":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "load failed")
        if request.model_name == "endless":
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "")
        return answer


@pytest.fixture
def service() -> Iterator[tuple[_Service, str]]:
    """A server of Triton's protocol, and its address."""
    service, server = _Service(), grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_requests_and_errors_of_the_client(service: tuple[_Service, str]) -> None:
    """Triton's own protobuf reads names of any length; Triton's reason is the error's text."""
    keys = {"triton-grpc-protocol-key": "v"}
    client = RepositoryClient(service[1], Keys(grpc=tuple(keys.items())))
    names = ["m", "a" * 127, "b" * 128, "grüße" * 40]
    for name in names:
        client.load(name, 30).result(60)
        client.unload(name).result(60)
    config = "{" + " " * 20_000 + "}"
    client.load("m", 30, config).result(60)
    assert service[0].requests == [
        *((act, name, keys) for name in names for act in ("load", "unload")),
        ("load", "m", {**keys, "config": config}),
    ]
    with pytest.raises(ServerError, match=r"^load failed$"):
        client.load("broken", 30).result(60)
    with pytest.raises(LoadTimeoutError, match="took longer than 30 s"):
        client.load("endless", 30).result(60)
    client.load("\udcff", 30).result(60)  # the name of a folder that is not UTF-8
    assert service[0].requests[-1][1] == "?"
    client.close()
    call = client.unload("m")  # the future fails, not the method
    with pytest.raises(ServerError, match="closed"):
        call.result(60)


def test_names_that_a_shell_changes(service: tuple[_Service, str]) -> None:
    """Triton 24.10 would wait forever for a process that a shell starts with other arguments."""
    with contextlib.closing(RepositoryClient(service[1], Keys(), uses_shell=True)) as client:
        for name in ("net copy", "net(1)", "a;b", "a$b", "it's"):
            call = client.load(name, 30)  # the future fails, not the method
            with pytest.raises(ServerError, match=r"through a shell, .* Rename it"):
                call.result(60)
        client.load("grüße-1.0_{a}", 30).result(60)
    assert [name for _, name, _ in service[0].requests] == ["grüße-1.0_{a}"]
