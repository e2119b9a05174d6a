"""The ports of a server: free ones, and checks of those that were requested."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Mapping

from torch_py_backend.errors import ToolError


def choose_ports(*requested: int) -> list[int]:
    """Return the ports, with a free port in place of each 0."""
    with contextlib.ExitStack() as stack:
        # Open until all are chosen, so that they differ. "": free on all addresses.
        sockets = [stack.enter_context(socket.socket()) for _ in requested]
        for free in sockets:
            free.bind(("", 0))
        return [
            port or free.getsockname()[1] for port, free in zip(requested, sockets, strict=True)
        ]


def client_address(address: str, port: int) -> str:
    """Return the address at which clients on this machine reach a service."""
    return f"{'127.0.0.1' if address == '0.0.0.0' else address}:{port}"  # noqa: S104


def check_ports(address: str, requested: Mapping[str, int]) -> None:
    """Listen for a moment on each port, named by its option, as the server will; 0 is any port.

    Raises:
        ToolError: a port is out of range, taken, named twice or not allowed for this user.
    """
    with contextlib.ExitStack() as open_sockets:
        for option, port in requested.items():
            listener = open_sockets.enter_context(socket.socket())
            # As Triton does: a port with connections in TIME_WAIT only is free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
                listener.listen()
            except OverflowError:
                raise ToolError(f"{option} is {port}; expected a port from 0 to 65535.") from None
            except OSError as error:
                is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
                cure = (
                    "another port; 0 takes a free one"
                    if is_port
                    else "an --address of this machine"
                )
                raise ToolError(
                    f"{option} {port} on {address} cannot be listened on: {error.strerror}."
                    f" Choose {cure}."
                ) from None
