"""Finds imports and features in an archive's sources that are not supported here."""

from __future__ import annotations

import ast
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch_py_backend.errors import join_names
from torch_py_backend.torchserve import mar_archive

# The modules of TorchServe that handlers can import, with the names in each; see `stand_in`.
PROVIDED: Mapping[str, Sequence[str]] = {
    "ts": ("__version__",),
    "ts.context": ("Context", "RequestProcessor"),
    "ts.handler_utils": (),
    "ts.handler_utils.text_utils": ("get_tokenizer", "ngrams_iterator"),
    "ts.handler_utils.timer": ("timed",),
    "ts.handler_utils.utils": ("send_intermediate_predict_response",),
    "ts.metrics": (),
    "ts.metrics.dimension": ("Dimension",),
    "ts.metrics.metric_type_enum": ("MetricTypes",),
    "ts.protocol": (),
    "ts.protocol.otf_message_handler": ("send_intermediate_predict_response",),
    "ts.torch_handler": (),
    "ts.torch_handler.base_handler": ("BaseHandler",),
    "ts.torch_handler.image_classifier": ("ImageClassifier",),
    "ts.torch_handler.image_segmenter": ("ImageSegmenter",),
    "ts.torch_handler.object_detector": ("ObjectDetector",),
    "ts.torch_handler.text_classifier": ("TextClassifier",),
    "ts.torch_handler.text_handler": ("TextHandler",),
    "ts.torch_handler.vision_handler": ("VisionHandler",),
    "ts.utils": (),
    "ts.utils.util": (
        "PredictionException",
        "list_classes_from_module",
        "load_label_mapping",
        "map_class_to_label",
    ),
    "ts.version": ("__version__",),
}
_PACKAGES = {name.rpartition(".")[0] for name in PROVIDED} - {""}
# The names that `curl -T` and `--data` give to the body of a request.
BODY = "body"
_BODY_FIELDS = (BODY, "data")
# A syntax tree takes a hundred times the memory of its text.
_SOURCE_BYTES = 1 << 20


def body_field(folder: Path, module: str) -> str | None:
    """Return the key under which a handler reads the body of a request; None: not found.

    Args:
        folder: the folder of the unpacked archive.
        module: the handler's module; a module of TorchServe if it is not in the folder.
    """
    tree = _parse(folder / f"{module}.py")
    if tree is None:
        return BODY
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return next((name for name in _BODY_FIELDS if name in texts), None)


def _parse(path: Path) -> ast.Module | None:
    """Return the syntax tree of a source; None: it is invalid, missing or too large."""
    try:
        if path.stat().st_size > _SOURCE_BYTES:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the archive's code
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # its import reports the error


# Attributes and names whose use has no effect or fails.
_ATTRIBUTES = {
    "metrics": "metrics of the handler are not recorded; Triton has its own",
    "get_request_header": "a request's headers are None: Triton does not pass them on",
    "get_all_request_header": "a request's headers are None: Triton does not pass them on",
    "get_sequence_id": "requests are not sequences here: the ID is None",
    "set_response_header": "headers of a response are not sent",
    "set_response_content_type": "the type of a response is not sent",
}
_NAMES = {
    "get_insights": "explanations: Triton has no such requests",
    "explain_handle": "explanations: Triton has no such requests",
    "describe_handle": "descriptions of a model: Triton has its own",
    "send_intermediate_predict_response": "streamed answers: the call raises an error",
}


def problems(folder: Path) -> list[str]:
    """Return the problems of an archive's sources, each with the files that have it."""
    files: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        tree = _parse(path)
        for node in ast.walk(tree) if tree is not None else ():
            for problem in _node_problems(folder, node):
                files.setdefault(problem, []).append(path.relative_to(folder).as_posix())
    return [f"{problem} ({join_names(dict.fromkeys(names))})" for problem, names in files.items()]


def _node_problems(folder: Path, node: ast.AST) -> Iterator[str]:
    modules: list[str] = []
    if isinstance(node, ast.Attribute):
        names, table = [node.attr], _ATTRIBUTES
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        names, table = [node.name], _NAMES
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names, table = [alias.name for alias in node.names], _NAMES
        modules = [node.module]
        if node.module in _PACKAGES:  # the names in packages of `ts` are modules
            modules = [f"{node.module}.{name}" for name in names if name != "__version__"]
    elif isinstance(node, ast.Import):
        names, table = [], _NAMES
        modules = [alias.name for alias in node.names]
    else:
        return
    for module in modules:
        top = module.partition(".")[0]
        if top == "ts" and module not in PROVIDED:
            yield f"{module} of TorchServe is not provided: its import fails"
        elif top != "ts" and not _is_importable(folder, top):
            yield f"{top} is not installed here: install it where the server's Python runs"
    yield from (table[name] for name in names if name in table)


def _is_importable(folder: Path, top: str) -> bool:
    """Return whether a module is in the archive, in the standard library or installed."""
    in_archive = mar_archive.holds_module(folder, top) or (folder / top).is_dir()
    if in_archive or top in sys.stdlib_module_names:
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False
