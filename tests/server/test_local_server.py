import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import fake_tritonserver
from serving import sent_array
from tritonclient.grpc import InferInput

from torch_py_backend import local_server
from torch_py_backend.errors import InputError, ToolError
from torch_py_backend.local_server import LocalServer
from torch_py_backend.server import serving
from torch_py_backend.server.supervisor import Event


def _sent(datatype: str, value: object) -> Any:
    array = local_server._array("x", value, datatype)
    return sent_array(InferInput("x", list(array.shape), datatype).set_data_from_numpy(array))


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("BYTES", [[b"\xff\0\0", b""]]),
        ("BYTES", [list(np.array([b"a", b"text"]))]),
        ("UINT8", [[0, 255]]),
        ("UINT64", np.array([[0, 2**64 - 1]], dtype=np.uint64)),
        ("INT8", np.array([[-128, 127]])),
        ("INT32", [[True, False]]),
        ("FP16", [[65504, float("inf")]]),
    ],
)
def test_values_that_fit(datatype: str, value: object) -> None:
    assert np.array_equal(_sent(datatype, value), np.array(value, dtype=object))


def test_strings_are_sent_as_utf_8_and_tensors_also_if_numpy_does_not_take_them() -> None:
    assert _sent("BYTES", [["ä\0", "b"]]).tolist() == [["ä\0".encode(), b"b"]]
    tensor = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    assert _sent("FP32", tensor).tolist() == [[1.5, -2.0]]


@pytest.mark.parametrize(
    ("datatype", "value", "error"),
    [
        ("INT32", [[2**31, 0]], InputError),
        ("UINT8", [[-1, 0]], InputError),
        ("INT64", np.array([[2**63, 0]], dtype=np.uint64), InputError),
        ("INT32", [[100.5, 1]], InputError),
        ("BYTES", [[None, "a"]], TypeError),
        ("BYTES", [[1, "a"]], TypeError),
        ("FP32", [["a", "2"]], ValueError),
    ],
)
def test_values_that_do_not_fit(datatype: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"'x' .* expected values of {datatype}|bytes-like|not convert"):
        _sent(datatype, value)


def test_before_the_start() -> None:
    server = LocalServer("models")
    for use in (
        lambda: server.infer("net", [1.0]),
        lambda: next(server.stream("net", [1.0])),
        lambda: server.client,
        lambda: server.url,
    ):
        with pytest.raises(ToolError, match=r"call start\(\) first"):
            use()
    server.stop()


def test_stopped_during_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread, as a notebook may call stop()."""
    server = LocalServer(tmp_path, allow_empty=True)

    def run(*arguments: Any, **_: object) -> None:
        threading.Thread(target=server.stop).start()
        while not arguments[4]():  # is_over
            time.sleep(0.01)

    monkeypatch.setattr(serving, "run", run)
    with pytest.raises(ToolError, match="stopped during its start"):
        server.start()


def test_a_model_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the server's own sentence."""
    reasons = {"a": "", "b": "stays down: no luck"}
    monkeypatch.setattr(serving, "run", lambda *arguments, **_: arguments[3](reasons))
    with pytest.raises(ToolError, match=r"^model 'b' stays down: no luck\.$"):
        LocalServer(tmp_path, allow_empty=True).start()


def test_the_log_of_a_server_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's log, which the message names, is kept; nothing else is."""
    triton = fake_tritonserver(tmp_path / "triton", "#!/bin/sh\necho nonsense\nexit 3\n")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with pytest.raises(ToolError, match="its log says more: ") as error:
        LocalServer(tmp_path, allow_empty=True, tritonserver=triton).start()
    log = Path(str(error.value).rpartition(": ")[2].rstrip("."))
    assert list((tmp_path / "temporary").iterdir()) == [log]
    assert log.read_text() == "nonsense\n"


def test_events_are_printed_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    local_server._report(Event("READY", "net", "reloaded"))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    local_server._report(Event("READY", "net", "reloaded"))
    assert capsys.readouterr().err == "READY   net: reloaded\n"
