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

# The modules of TorchServe that handlers can import; `stand_in` provides them.
PROVIDED = frozenset(
    {
        "ts",
        "ts.context",
        "ts.handler_utils",
        "ts.handler_utils.text_utils",
        "ts.handler_utils.timer",
        "ts.handler_utils.utils",
        "ts.metrics",
        "ts.metrics.dimension",
        "ts.metrics.metric_type_enum",
        "ts.protocol",
        "ts.protocol.otf_message_handler",
        "ts.torch_handler",
        "ts.torch_handler.base_handler",
        "ts.torch_handler.image_classifier",
        "ts.torch_handler.image_segmenter",
        "ts.torch_handler.object_detector",
        "ts.torch_handler.text_classifier",
        "ts.torch_handler.text_handler",
        "ts.torch_handler.vision_handler",
        "ts.utils",
        "ts.utils.util",
        "ts.version",
    }
)
_PACKAGES = {name.rpartition(".")[0] for name in PROVIDED} - {""}
# The names that `curl -T` and `--data` give to the body of a request.
BODY = "body"
_BODIES = (BODY, "data")
# A syntax tree takes a hundred times the memory of its text.
_SOURCE_BYTES = 1 << 20


def body(folder: Path, module: str) -> str | None:
    """Return the key under which a handler reads the body of a request; None: not found.

    Args:
        folder: the folder of the unpacked archive.
        module: the handler's module; a module of TorchServe if it is not in the folder.
    """
    tree = _parsed(folder / f"{module}.py")
    if tree is None:
        return BODY
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return next((name for name in _BODIES if name in texts), None)


def problems(folder: Path) -> list[str]:
    """Return the problems of an archive's sources, each with the files that have it."""
    problems: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        tree = _parsed(path)
        for problem in _problems(folder, tree) if tree is not None else ():
            problems.setdefault(problem, []).append(path.relative_to(folder).as_posix())
    return [
        f"{problem} ({join_names(dict.fromkeys(files))})" for problem, files in problems.items()
    ]


def _parsed(path: Path) -> ast.Module | None:
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


def _problems(folder: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from _lookup(_ATTRIBUTES, node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _lookup(_NAMES, node.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from _missing_modules(folder, _imported_modules(node))
            for alias in node.names:
                yield from _lookup(_NAMES, alias.name)
        elif isinstance(node, ast.Import):
            yield from _missing_modules(folder, [alias.name for alias in node.names])


def _lookup(table: Mapping[str, str], name: str) -> Iterator[str]:
    if name in table:
        yield table[name]


def _imported_modules(node: ast.ImportFrom) -> list[str]:
    """Return the modules that `from … import …` imports; names from `ts` packages are modules."""
    module = node.module or ""
    if module in _PACKAGES:
        return [f"{module}.{alias.name}" for alias in node.names if alias.name != "__version__"]
    return [module]


def _missing_modules(folder: Path, modules: Sequence[str]) -> Iterator[str]:
    for module in modules:
        top = module.partition(".")[0]
        if top == "ts":
            if module not in PROVIDED:
                yield f"{module} of TorchServe is not provided: its import fails"
        elif not (
            top in sys.stdlib_module_names
            or mar_archive.holds_module(folder, top)
            or (folder / top).is_dir()
            or _is_installed(top)
        ):
            yield f"{top} is not installed here: install it where the server's Python runs"


def _is_installed(top: str) -> bool:
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False
