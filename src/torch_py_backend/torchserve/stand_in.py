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

from torch_py_backend.torchserve import context, handlers

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


def _members(*values: type | Callable[..., object]) -> dict[str, object]:
    return {value.__name__: value for value in values}


# The modules that handlers can import, with their contents.
MODULES: Mapping[str, Mapping[str, object]] = {
    "ts": {"__version__": context.VERSION},
    "ts.context": _members(context.Context, context.RequestProcessor),
    "ts.handler_utils": {},
    "ts.handler_utils.timer": _members(timed),
    "ts.handler_utils.utils": _members(send_intermediate_predict_response),
    "ts.metrics": {},
    "ts.metrics.dimension": _members(context.Dimension),
    "ts.metrics.metric_type_enum": _members(MetricTypes),
    "ts.protocol": {},
    "ts.protocol.otf_message_handler": _members(send_intermediate_predict_response),
    "ts.torch_handler": {},
    "ts.torch_handler.base_handler": _members(handlers.BaseHandler),
    "ts.torch_handler.image_classifier": _members(handlers.ImageClassifier),
    "ts.torch_handler.image_segmenter": _members(handlers.ImageSegmenter),
    "ts.torch_handler.object_detector": _members(handlers.ObjectDetector),
    "ts.torch_handler.vision_handler": _members(handlers.VisionHandler),
    "ts.utils": {},
    "ts.utils.util": _members(
        handlers.PredictionException,
        handlers.list_classes_from_module,
        handlers.load_label_mapping,
        handlers.map_class_to_label,
    ),
    "ts.version": {"__version__": context.VERSION},
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
    for name, members in MODULES.items():
        module = ModuleType(name, f"A part of TorchServe's {name}, by torch-py-backend.")
        is_package = any(other.startswith(f"{name}.") for other in MODULES)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=is_package)
        if is_package:
            module.__path__ = []
        vars(module).update(members)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    return True
