"""Serve any PyTorch model on NVIDIA Triton Inference Server, from Python.

    import torch_py_backend

    torch_py_backend.save_model(module, "models/net", example_inputs=torch.rand(2, 4))
    with torch_py_backend.serve("models") as server:
        outputs = server.infer("net", torch.rand(3, 4))

Importing the package imports neither torch nor a client; the first use of a name does.
The module `composition` calls other models from a model's code, and `errors` has the exceptions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_py_backend.local_server import LocalServer, serve
    from torch_py_backend.saving.save_model import save_model

__version__ = "0.1.0"
__all__ = ["LocalServer", "save_model", "serve"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = "saving.save_model" if name == "save_model" else "local_server"
    try:
        module = importlib.import_module(f"{__name__}.{place}")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"torch_py_backend.{name} needs {error.name}: pip install 'torch-py-backend[server]'."
        ) from error
    value: object = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
