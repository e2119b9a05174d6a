"""Ports that are free, and errors for those that are not."""

from __future__ import annotations

import socket

import pytest

from torch_py_backend.errors import ToolError
from torch_py_backend.server.ports import choose_ports


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
        ("192.0.2.1", [0], r"192.0.2.1.*an --address of this machine\."),
    ],
    ids=["twice", "taken for one address", "address"],
)
def test_ports_that_cannot_be_listened_on(address: str, ports: list[int | None], says: str) -> None:
    """The error names the address and the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        with pytest.raises(ToolError, match=says.replace("TAKEN", str(taken))):
            choose_ports(address, [taken if port is None else port for port in ports])
