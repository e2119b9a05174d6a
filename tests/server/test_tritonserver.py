"""The start and the end of a tritonserver; `tests/live` runs real ones."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from torch_py_backend.errors import ToolError
from torch_py_backend.server.tritonserver import Server, choose_ports


def test_a_server_that_was_not_started(tmp_path: Path) -> None:
    """It may be stopped."""
    server = Server(tmp_path, ports=(80, 0, 0), address="0.0.0.0")
    assert server.http_address == "127.0.0.1:80"
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
    with pytest.raises(ToolError, match=r"two words' has the character ' '.* Rename it"):
        server.start()


def test_a_temporary_folder_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(OSError, match="/none/torch-py-b"):
        Server(tmp_path).start()


# --- ports -------------------------------------------------------------------------------------


def test_ports() -> None:
    """Each 0 becomes a free port, and no two are the same."""
    # So many that some would be the same if chosen one by one: the kernel has about 14,000.
    ports = choose_ports("127.0.0.1", [0] * 500)
    assert len(set(ports)) == 500
    assert choose_ports("127.0.0.1", ports[:1]) == ports[:1]


def test_ports_that_can_be_listened_on() -> None:
    """A port whose last connection has just ended is free, and stays free."""
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
def test_ports_that_cannot_be_listened_on(address: str, ports: list[int | None], says: str) -> None:
    """The error names the address and the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        with pytest.raises(OSError, match=says.replace("TAKEN", str(taken))):
            choose_ports(address, [taken if port is None else port for port in ports])
