"""Find, install into, start, supervise and stop a tritonserver. Imports no torch."""

from torch_py_backend.server.tritonserver import Server

__all__ = ["Server"]
