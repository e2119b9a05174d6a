"""The addresses and ports of a server."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from torch_py_backend.errors import ToolError

# Clients on this machine reach all addresses at the loopback address of the same family.
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


def is_ipv6(address: str) -> bool:
    return ":" in address


def client_address(address: str, port: int) -> str:
    """Return host and port at which clients on this machine reach a service, as in a URL."""
    address = _WILDCARDS.get(address, address)
    return f"[{address}]:{port}" if is_ipv6(address) else f"{address}:{port}"


def choose_ports(address: str, ports: Sequence[int]) -> list[int]:
    """Return ports that can be listened on; 0 becomes any port."""
    with contextlib.ExitStack() as stack:
        # Open until all are chosen, so that they differ.
        listeners = [stack.enter_context(listen(address, port)) for port in ports]
        return [listener.getsockname()[1] for listener in listeners]


def listen(address: str, port: int) -> socket.socket:
    """Listen on a port, as Triton does; 0 is any port.

    Raises:
        ToolError: the port is taken or not allowed for this user, or the address is not of this
            machine.
    """
    is_6 = is_ipv6(address)
    family = socket.AF_INET6 if is_6 else socket.AF_INET
    try:
        # The address :: is all addresses of both families, as for Triton.
        return socket.create_server((address, port), family=family, dualstack_ipv6=is_6)
    except OSError as error:
        raise ToolError(
            f"{error.strerror}. Choose another port, such as 0, which takes a free one, or an"
            " --address of this machine."
        ) from None
