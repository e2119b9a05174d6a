"""Find, install into, start, supervise and stop a tritonserver.

Imports no torch. `Server` is public.
"""

from torch_py_backend.server.tritonserver import Server

__all__ = ["Server"]
