import http.client
import io
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


_PARSED = (
    "[libprotobuf] Error parsing text-format inference.ModelConfig: 2:16: Expected string\n"
    "I1127 another model\n"
)
_POLLED = "E1127] \"Poll failed for model directory 'm': cannot be read\"\n"
_NOT_POLLED = "failed to load 'm', failed to poll from model repository"
_CODES = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "details", "log", "says"),
    [
        (_CODES.OK, "", "", ""),
        (_CODES.INVALID_ARGUMENT, "load failed", "", "load failed"),
        (_CODES.DEADLINE_EXCEEDED, "", "", "StatusCode.DEADLINE_EXCEEDED"),
        # The reason of an unreadable config may stand a few lines above.
        (_CODES.INTERNAL, _NOT_POLLED, _PARSED + _POLLED, "cannot be read: 2:16: Expected string"),
        (_CODES.INTERNAL, _NOT_POLLED, _POLLED, "cannot be read"),
        (_CODES.INTERNAL, _NOT_POLLED, "", _NOT_POLLED),
    ],
)
def test_why_a_load_failed(
    code: grpc.StatusCode, details: str, log: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(log)
    call = Mock(code=lambda: code, details=lambda: details)
    assert TritonClient("", "", log=tmp_path / "log").failure("m", call) == says


def test_names_that_are_not_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    body = io.BytesIO(b'[{"name": "gr\xfc\xdfe"}, {"name": "net"}]')
    monkeypatch.setattr(triton, "_OPEN", lambda *_, **__: body)
    assert list(TritonClient("", "").models()) == ["gr\ufffd\ufffde", "net"]


def test_a_server_that_dies_during_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    incomplete = Mock(side_effect=http.client.IncompleteRead(b"["))
    monkeypatch.setattr(triton, "_OPEN", incomplete)
    with pytest.raises(ConnectionError, match="IncompleteRead"):
        TritonClient("", "").models()


def _version(state: str, reason: str = "") -> dict[str, str]:
    return {"name": "m", "version": "1", "state": state, "reason": reason}


_WITHDRAWN = _version("UNAVAILABLE", "unloaded")
_FAILED = _version("UNAVAILABLE", "Internal: because.")


@pytest.mark.parametrize(
    ("versions", "state"),
    [
        ([_WITHDRAWN, _version("READY")], ModelState(ready=True)),
        ([_WITHDRAWN, _version("UNLOADING")], ModelState(unloaded=True)),
        ([_WITHDRAWN, _FAILED], ModelState(unloaded=True, reason="because")),
        ([_FAILED], ModelState(reason="because")),
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
