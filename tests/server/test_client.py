"""Requests to a server and its answers, with servers in this process; tests/live has real ones."""

from __future__ import annotations

import contextlib
import http.client
import io
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from torch_py_backend.server import client as triton
from torch_py_backend.server.client import ModelState, TritonClient

# --- loads and unloads -----------------------------------------------------------------------


_REFUSALS = {
    "broken": (grpc.StatusCode.INVALID_ARGUMENT, "load failed"),
    "unread": (grpc.StatusCode.INTERNAL, "failed to poll from model repository"),
    "endless": (grpc.StatusCode.DEADLINE_EXCEEDED, ""),
}


class _Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Records requests."""

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
        if request.model_name in _REFUSALS:
            context.abort(*_REFUSALS[request.model_name])
        return answer


@pytest.fixture
def service() -> Iterator[tuple[_Service, str]]:
    service, server = _Service(), grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_requests_and_errors_of_the_client(service: tuple[_Service, str]) -> None:
    keys = {"triton-grpc-protocol-admin-key": "v"}
    explain = {"unread": "its config is wrong"}
    client = TritonClient("", service[1], key="v", poll_failure=lambda name: explain.get(name, ""))

    def failure(call: grpc.Future) -> str:
        with contextlib.suppress(grpc.RpcError):
            call.result(60)
        return client.failure(service[0].requests[-1][1], call)

    assert failure(client.load("m", 30)) == failure(client.unload("grüße")) == ""
    assert failure(client.load("m", 30, {"name": "n"})) == ""
    assert service[0].requests == [
        ("load", "m", keys),
        ("unload", "grüße", keys),
        ("load", "m", {**keys, "config": '{"name": "n"}'}),
    ]
    assert failure(client.load("broken", 30)) == "load failed"
    assert failure(client.load("endless", 30)) == "StatusCode.DEADLINE_EXCEEDED"
    assert failure(client.load("unread", 30)) == "its config is wrong"
    assert failure(client.load("\udcff", 30)) == ""  # the name of a folder that is not UTF-8
    assert service[0].requests[-1][1] == "?"
    client.close()


# --- states ----------------------------------------------------------------------------------


def test_names_that_are_not_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    client = TritonClient("", "")
    body = b'[{"name": "gr\xfc\xdfe"}, {"name": "net"}]'
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(body))
    assert [state.name for state in client.models()] == ["gr\ufffd\ufffde", "net"]
    body = b'{"name": "na\xefve"}'
    assert client.config("m") == {"name": "na\ufffdve"}


def test_a_server_that_dies_during_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    incomplete = Mock(side_effect=http.client.IncompleteRead(b"["))
    monkeypatch.setattr(urllib.request, "urlopen", incomplete)
    with pytest.raises(ConnectionError, match="IncompleteRead"):
        TritonClient("", "").models()


def _version(number: str, state: str, reason: str = "") -> dict[str, str]:
    return {"name": "m", "version": number, "state": state, "reason": reason}


_WITHDRAWN = _version("1", "UNAVAILABLE", "unloaded")


@pytest.mark.parametrize(
    ("versions", "state"),
    [
        ([_WITHDRAWN, _version("2", "READY")], ModelState("m", ready=True, versions="2")),
        ([_WITHDRAWN, _version("2", "UNLOADING")], ModelState("m", unloaded=True, versions="1,2")),
        (
            [_WITHDRAWN, _version("2", "UNAVAILABLE", "Internal: because.")],
            ModelState("m", unloaded=True, reason="because", versions="1,2"),
        ),
        (
            [_version("2", "UNAVAILABLE", "Internal: because.")],
            ModelState("m", reason="because", versions="2"),
        ),
        ([{"name": "m"}], ModelState("m")),
    ],
    ids=["one serves", "unloaded", "unloaded after a failure", "failed", "never loaded"],
)
def test_states_of_several_versions(versions: list[dict[str, str]], state: ModelState) -> None:
    assert triton.states(versions) == [state]


# --- reasons ---------------------------------------------------------------------------------


_NESTED = (
    "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: TritonModelException:"
    " model 'm': /a/b.pt failed: model 'm': no x.\n\nAt:\n  y;"
)


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        (_NESTED, "/a/b.pt failed: no x"),
        ("load failed for model 'm': at least one version", "at least one version"),
        ("Invalid argument: size is 1;", "size is 1"),
        ("model 'n': it failed; now", "model 'n': it failed; now"),
        (".", "no reason was given"),
    ],
    ids=["nested", "no version", "argument", "another model", "none"],
)
def test_causes_of_failed_loads(reason: str, cause: str) -> None:
    assert triton.cause("m", reason) == cause
