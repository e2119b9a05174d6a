"""The functions of `ts.utils.util`: names of classes, and PredictionException."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)


class PredictionException(Exception):  # noqa: N818  TorchServe's name
    """An error of a handler with the HTTP status of the response."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """Return the classes that a module defines, without imported ones."""
    return [
        value
        for _, value in inspect.getmembers(module, inspect.isclass)
        if value.__module__ == module.__name__ and issubclass(value, parent_class or object)
    ]


def load_label_mapping(mapping_file_path: str) -> dict[str, str] | None:
    """Return the names of classes in an index_to_name.json; None: there is no such file.

    The value of a class is its name or a list whose last entry is its name, as for ImageNet. Or the
    list `object_type_names` has the names in the order of the classes.

    Raises:
        ValueError: the file has another structure.
    """
    path = Path(mapping_file_path)
    if not path.is_file():
        log.info("%s does not exist: answers have the numbers of classes.", path.name)
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"{path.name} holds no object of names by class")  # noqa: TRY004
    listed = document.get("object_type_names")
    if isinstance(listed, list):
        return {str(number): name for number, name in enumerate(listed)}
    names = {
        key: value[-1] if isinstance(value, list) else value for key, value in document.items()
    }
    for key, name in names.items():
        if not isinstance(name, str):
            raise ValueError(f"{path.name} has no name, but {name!r}, for class {key}")  # noqa: TRY004
    return names


def map_class_to_label(
    probs: Sequence[Any],
    mapping: dict[str, str] | None = None,
    lbl_classes: Sequence[Sequence[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Return the values of each row by the names of their classes.

    Args:
        probs: for each row, a value for each class.
        mapping: names by class; None: use their numbers.
        lbl_classes: for each row, its classes; None: all, in order.
    """
    if not isinstance(probs, list):
        raise TypeError(f"map_class_to_label takes lists of values, not a {type(probs).__name__}")
    rows = lbl_classes if lbl_classes is not None else [range(len(row)) for row in probs]
    return [
        {
            mapping[str(number)] if mapping is not None else str(number): value
            for number, value in zip(classes, values, strict=False)
        }
        for classes, values in zip(rows, probs, strict=False)
    ]
