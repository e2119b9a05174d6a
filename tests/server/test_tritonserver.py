"""The start and the arguments of a tritonserver; `tests/live` runs real ones."""

import re
import socket
import tempfile
from pathlib import Path

import pytest
from documentation import ROOT

from torch_py_backend.errors import ToolError
from torch_py_backend.server import client, tritonserver
from torch_py_backend.server.tritonserver import Server, choose_ports

_DOCUMENTED = re.findall(
    r"^--(?:http|grpc)-restricted\S+$", (ROOT / "docs/security.md").read_text(), re.MULTILINE
)


def test_a_server_that_was_not_started_may_be_stopped(tmp_path: Path) -> None:
    server = Server(tmp_path, ports=(80, 0, 0, 0), address="0.0.0.0")
    assert server.http_address == "127.0.0.1:80"
    assert Server(tmp_path, address="localhost").address == "127.0.0.1"
    with pytest.raises(ToolError, match=r"--address is 'no\.\.name'"):
        Server(tmp_path, address="no..name")
    server.stop()


@pytest.mark.parametrize("in_repository", [True, False])
def test_paths_that_a_shell_changes(
    in_repository: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 24.10 would wait forever for processes that a shell starts with other arguments."""
    folder = tmp_path / "two words"
    folder.mkdir()
    if not in_repository:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
    server = Server(folder if in_repository else tmp_path)
    with pytest.raises(ToolError, match=r"two words' has the character ' '.* Rename it"), server:
        pass


def test_restrictions_are_as_documented(tmp_path: Path) -> None:
    options = Server(tmp_path, restrict=tritonserver.SENSITIVE, key="SECRET")._options()
    assert [f"--{name}={options[name]}" for name in tritonserver.RESTRICTIONS] == _DOCUMENTED
    assert "SECRET" not in str(Server(tmp_path, key="SECRET")._options())
    with pytest.raises(ToolError, match="--restrict"):
        Server(tmp_path, restrict=["trace:x"], key="SECRET")
    for key in ("geheim ü", "a\nb"):
        with pytest.raises(ToolError, match="the admin key"):
            Server(tmp_path, restrict=["trace"], key=key)


def test_each_0_becomes_another_free_port() -> None:
    # So many that some would be the same if chosen one by one: the kernel has about 14,000.
    ports = choose_ports("127.0.0.1", [0] * 500)
    assert len(set(ports)) == 500


def test_a_port_whose_last_connection_has_just_ended_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        answer, _ = listener.accept()
        answer.close()  # first: the connection's end is remembered on this side
        client.close()
    for _ in range(2):
        assert choose_ports("127.0.0.1", [port, 0])[0] == port


@pytest.mark.parametrize(
    ("address", "ports", "says"),
    [
        ("127.0.0.1", [47113, 47113], "Address already in use .*47113"),
        ("0.0.0.0", [None], "Address already in use .*TAKEN"),
        ("192.0.2.1", [0], "192.0.2.1"),
    ],
    ids=["twice", "taken for one address", "address"],
)
def test_the_error_of_a_taken_port_names_it(
    address: str, ports: list[int | None], says: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        with pytest.raises(OSError, match=says.replace("TAKEN", str(taken))):
            choose_ports(address, [taken if port is None else port for port in ports])


_LOGS = {
    "tritonserver: unrecognized option '--no'\nUsage:\n": "unrecognized option '--no'",
    "Unexpected argument: b\nUsage: tritonserver\n": "Unexpected argument: b",
    'Bad option: "--x".\nunknown restricted api\n': 'Bad option: "--x". unknown restricted api',
    'I1 "Exiting."\nerror: creating server: Invalid\n': "creating server: Invalid",
}


def test_the_reason_of_a_server_that_does_not_start(tmp_path: Path) -> None:
    """tests/live has an error of its log."""
    for text, reason in _LOGS.items():
        (tmp_path / "log").write_text(text)
        assert client.logged(tmp_path / "log", tritonserver._ERROR) == reason
