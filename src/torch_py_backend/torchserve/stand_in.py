"""Replacements for TorchServe's package `ts` and its modules, which handlers import.

They are installed only if TorchServe itself is not installed, and only in a process that serves an
archive.
"""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NoReturn, TypeVar

from torch_py_backend.torchserve import context, handlers, text
from torch_py_backend.torchserve.handler_lint import PROVIDED

T = TypeVar("T", bound="Callable[..., object]")


class MetricTypes(enum.Enum):
    """`ts.metrics.metric_type_enum.MetricTypes`."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


def timed(method: T) -> T:
    """Return the method unchanged: Triton's statistics and traces have its time."""
    return method


def send_intermediate_predict_response(*_args: object, **_named: object) -> NoReturn:
    """Raise an error: answers cannot be streamed.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "send_intermediate_predict_response() streams an answer, which is not served for TorchServe"
        " archives; return the whole answer from handle()"
    )


_MEMBERS: Mapping[str, object] = {
    "__version__": context.VERSION,
    **vars(context),
    **vars(handlers),
    **vars(text),
    "MetricTypes": MetricTypes,
    "timed": timed,
    "send_intermediate_predict_response": send_intermediate_predict_response,
}


def install() -> bool:
    """Install the modules.

    Returns:
        Whether they are installed; False: TorchServe is installed and is used.
    """
    try:
        spec = importlib.util.find_spec("ts.torch_handler.base_handler")
    except (ImportError, ValueError, AttributeError):  # no package `ts`, or another one
        spec = None
    if spec is not None and spec.loader is not None:
        return False
    for name, members in PROVIDED.items():
        module = ModuleType(name, f"A part of TorchServe's {name}, by torch-py-backend.")
        is_package = any(other.startswith(f"{name}.") for other in PROVIDED)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=is_package)
        if is_package:
            module.__path__ = []
        vars(module).update({member: _MEMBERS[member] for member in members})
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    return True
