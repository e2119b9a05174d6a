"""Requests to a server and its answers; tests/live has real ones."""

from __future__ import annotations

import http.client
import io
import urllib.request
from pathlib import Path
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
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", "StatusCode.DEADLINE_EXCEEDED"),
    ],
)
def test_why_a_load_failed(code: grpc.StatusCode, details: str, says: str) -> None:
    call = Mock(code=lambda: code, details=lambda: details)
    assert TritonClient("", "").failure("m", call) == says


def test_the_reason_of_an_unreadable_config_may_stand_a_few_lines_above(tmp_path: Path) -> None:
    log = tmp_path / "log"
    client = TritonClient("", "", log=log)
    parsed = "[libprotobuf] Error parsing text-format inference.ModelConfig: 2:16: Expected string"
    failed = "E1127] \"Poll failed for model directory 'net': cannot be read\""
    details = "failed to load 'net', failed to poll from model repository"
    call = Mock(code=lambda: grpc.StatusCode.INTERNAL, details=lambda: details)
    for text, reason in (
        (f"{parsed}\nI1127 another model\n{failed}\n", "cannot be read: 2:16: Expected string"),
        (f"{failed}\n", "cannot be read"),
        ("", details),
    ):
        log.write_text(text)
        assert client.failure("net", call) == reason


def test_names_that_are_not_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    body = io.BytesIO(b'[{"name": "gr\xfc\xdfe"}, {"name": "net"}]')
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: body)
    assert list(TritonClient("", "").models()) == ["gr\ufffd\ufffde", "net"]


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
        ([_WITHDRAWN, _version("2", "READY")], ModelState(ready=True)),
        ([_WITHDRAWN, _version("2", "UNLOADING")], ModelState(unloaded=True)),
        (
            [_WITHDRAWN, _version("2", "UNAVAILABLE", "Internal: because.")],
            ModelState(unloaded=True, reason="because"),
        ),
        (
            [_version("2", "UNAVAILABLE", "Internal: because.")],
            ModelState(reason="because"),
        ),
        ([{"name": "m"}], ModelState()),
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
