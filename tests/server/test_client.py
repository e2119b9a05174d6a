"""Requests to a server and its answers; tests/live has real ones."""

from __future__ import annotations

import http.client
import io
import urllib.request
from unittest.mock import Mock

import grpc
import pytest

from torch_py_backend.server import client as triton
from torch_py_backend.server.client import ModelState, TritonClient


def test_requests_have_the_key() -> None:
    client = TritonClient("", "", key="v")
    client._service = service = Mock()
    client.load("\udcff", 30)  # the name of a folder that is not UTF-8
    client.unload("grüße")
    load, unload = (
        method.future.call_args
        for method in (service.RepositoryModelLoad, service.RepositoryModelUnload)
    )
    assert (load.args[0].model_name, unload.args[0].model_name) == ("?", "grüße")
    keys = [("triton-grpc-protocol-admin-key", "v")]
    assert load.kwargs["metadata"] == unload.kwargs["metadata"] == keys


@pytest.mark.parametrize(
    ("code", "details", "says"),
    [
        (grpc.StatusCode.OK, "", ""),
        (grpc.StatusCode.INVALID_ARGUMENT, "load failed", "load failed"),
        (grpc.StatusCode.INTERNAL, "failed to poll from model repository", "its config is wrong"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", "StatusCode.DEADLINE_EXCEEDED"),
    ],
)
def test_why_a_load_failed(code: grpc.StatusCode, details: str, says: str) -> None:
    client = TritonClient("", "", poll_failure=lambda _: "its config is wrong")
    call = Mock(code=lambda: code, details=lambda: details)
    assert client.failure("m", call) == says


def test_names_that_are_not_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    client = TritonClient("", "")
    body = b'[{"name": "gr\xfc\xdfe"}, {"name": "net"}]'
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(body))
    assert list(client.models()) == ["gr\ufffd\ufffde", "net"]
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
    assert triton.states(versions) == {"m": state}


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
