"""Find, install into, start, supervise and stop a tritonserver.

Imports no torch. `Server` is public; it is imported late, since the guard of `cleanup` is a process
that needs only that module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_py_backend.server.tritonserver import Server

__all__ = ["Server"]


def __getattr__(name: str) -> Any:
    if name != "Server":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch_py_backend.server.tritonserver import Server  # noqa: PLC0415

    return Server
