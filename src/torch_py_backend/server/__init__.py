"""A tritonserver: found, prepared, started, supervised, healed and stopped.

Imports no torch. `Server` is public.
"""

from torch_py_backend.server.tritonserver import Server

__all__ = ["Server"]
