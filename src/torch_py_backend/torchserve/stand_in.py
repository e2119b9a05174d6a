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
from types import MappingProxyType, ModuleType
from typing import Any

from torch_py_backend.torchserve import context, handlers, labels, text


class MetricTypes(enum.Enum):
    """`ts.metrics.metric_type_enum.MetricTypes`."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


def timed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method unchanged: Triton's statistics and traces have its time."""
    return method


def send_intermediate_predict_response(*_args: Any, **_named: Any) -> None:
    """Raise an error: answers cannot be streamed.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "send_intermediate_predict_response() streams an answer, which is not served for TorchServe"
        " archives; return the whole answer from handle()"
    )


_UTIL = (
    labels.PredictionException,
    labels.list_classes_from_module,
    labels.load_label_mapping,
    labels.map_class_to_label,
)


def _by_name(*values: Any) -> Mapping[str, Any]:
    return {value.__name__: value for value in values}


# The names in each module.
MODULES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "ts": {"__version__": context.VERSION},
        "ts.context": _by_name(context.Context, context.RequestProcessor),
        "ts.handler_utils": {},
        "ts.handler_utils.text_utils": _by_name(text.get_tokenizer, text.ngrams_iterator),
        "ts.handler_utils.timer": _by_name(timed),
        "ts.handler_utils.utils": _by_name(send_intermediate_predict_response),
        "ts.metrics": {},
        "ts.metrics.dimension": _by_name(context.Dimension),
        "ts.metrics.metric_type_enum": _by_name(MetricTypes),
        "ts.protocol": {},
        "ts.protocol.otf_message_handler": _by_name(send_intermediate_predict_response),
        "ts.torch_handler": {},
        "ts.torch_handler.base_handler": _by_name(handlers.BaseHandler),
        "ts.torch_handler.image_classifier": _by_name(handlers.ImageClassifier),
        "ts.torch_handler.image_segmenter": _by_name(handlers.ImageSegmenter),
        "ts.torch_handler.object_detector": _by_name(handlers.ObjectDetector),
        "ts.torch_handler.text_classifier": _by_name(text.TextClassifier),
        "ts.torch_handler.text_handler": _by_name(text.TextHandler),
        "ts.torch_handler.vision_handler": _by_name(handlers.VisionHandler),
        "ts.utils": {},
        "ts.utils.util": _by_name(*_UTIL),
        "ts.version": {"__version__": context.VERSION},
    }
)


def install() -> bool:
    """Install the modules.

    Returns:
        Whether they are installed; False: TorchServe is installed and is used.
    """
    if _is_installed():
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


def _is_installed() -> bool:
    try:
        spec = importlib.util.find_spec("ts.torch_handler.base_handler")
    except (ImportError, ValueError, AttributeError):  # no package `ts`, or another one
        return False
    return spec is not None and spec.loader is not None
