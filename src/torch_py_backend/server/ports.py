"""The addresses and ports of a server."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Mapping

from torch_py_backend.errors import ToolError

# Clients on this machine reach all addresses at the loopback address of the same family.
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


def is_ipv6(address: str) -> bool:
    return ":" in address


def client_address(address: str, port: int) -> str:
    """Return host and port at which clients on this machine reach a service, as in a URL."""
    address = _WILDCARDS.get(address, address)
    return f"[{address}]:{port}" if is_ipv6(address) else f"{address}:{port}"


def choose_ports(address: str, requested: Mapping[str, int]) -> list[int]:
    """Return ports, named by their options, that can be listened on; 0 is any port."""
    with contextlib.ExitStack() as stack:
        # Open until all are chosen, so that they differ.
        listeners = [
            stack.enter_context(listen(option, address, port)) for option, port in requested.items()
        ]
        return [listener.getsockname()[1] for listener in listeners]


def listen(option: str, address: str, port: int) -> socket.socket:
    """Listen on a port, as Triton does: one with connections in TIME_WAIT only is free.

    Args:
        option: the option that sets the port, for the error.
        address: the address, IPv4 or IPv6, or a host name.
        port: the port; 0 is any port.

    Raises:
        ToolError: the port is taken or not allowed for this user.
    """
    listener = socket.socket(socket.AF_INET6 if is_ipv6(address) else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
    except OSError as error:
        listener.close()
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        cure = "another port; 0 takes a free one" if is_port else "an --address of this machine"
        raise ToolError(
            f"{option} {port} on {address} cannot be listened on: {error.strerror}. Choose {cure}."
        ) from None
    return listener
