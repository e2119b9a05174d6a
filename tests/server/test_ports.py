"""Ports that are free, and errors for those that are not."""

from __future__ import annotations

import socket

import pytest

from torch_py_backend.errors import ToolError
from torch_py_backend.server.ports import choose_ports


def test_ports() -> None:
    """Each 0 becomes a free port, and no two are the same."""
    # So many that some would be the same if chosen one by one: the kernel has about 14,000.
    ports = choose_ports("127.0.0.1", {str(number): 0 for number in range(500)})
    assert len(set(ports)) == 500
    assert choose_ports("127.0.0.1", {"--http-port": ports[0]}) == ports[:1]


def test_ports_that_can_be_listened_on() -> None:
    """A port whose last connection has just ended is free, and stays free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        answer, _ = listener.accept()
        answer.close()  # first: the connection's end is remembered on this side
        client.close()
    for _ in range(2):
        assert choose_ports("127.0.0.1", {"--http-port": port, "--grpc-port": 0})[0] == port


@pytest.mark.parametrize(
    ("address", "requested", "says"),
    [
        ("127.0.0.1", {"--a": 47113, "--b": 47113}, "--b 47113 on 127.0.0.1 cannot"),
        ("127.0.0.1", {"--a": 0, "--b": None}, "--b TAKEN on 127.0.0.1 .*: Address already in use"),
        ("0.0.0.0", {"--b": None}, "--b TAKEN on 0.0.0.0 .*: Address already in use"),
        ("192.0.2.1", {"--a": 0}, "--a 0 on 192.0.2.1 .*Choose an --address of this machine."),
    ],
    ids=["twice", "taken", "taken-for-all-addresses", "address"],
)
def test_ports_that_cannot_be_listened_on(
    address: str, requested: dict[str, int | None], says: str
) -> None:
    """The error names the port and its option."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        named = {option: taken if port is None else port for option, port in requested.items()}
        with pytest.raises(ToolError, match=says.replace("TAKEN", str(taken))):
            choose_ports(address, named)
