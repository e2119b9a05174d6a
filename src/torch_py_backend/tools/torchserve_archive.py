"""Unpacks a TorchServe archive whose handler is one of TorchServe's own.

Such an archive holds TorchScript, or a class and its state_dict. The handler itself is not part of
the archive: what it did before and after forward() becomes a class in hooks.py.
"""

from __future__ import annotations

import json
import lzma
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from torch_py_backend.errors import ArchiveError, summarize

_MANIFEST = "MAR-INF/MANIFEST.json"
_HANDLERS = ("base_handler", "image_classifier", "image_segmenter", "object_detector")
# Top-level numbers of model-config.yaml, for which a YAML parser would be a dependency.
_NUMBER = r"(?m)^{}:[ \t]*(\d+)[ \t]*(?:#.*)?$"
# What zipfile, its decompressors and a manifest of another form raise; RuntimeError: the archive is
# encrypted, or its compression is unknown.
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    TypeError,
)


class UnpackedArchive(NamedTuple):
    """The model of an archive.

    Attributes:
        model_file: the file of TorchScript, or of weights with a source file of the same name
            beside it.
        settings: entries of config.pbtxt for a model with a batch dimension.
    """

    model_file: Path
    settings: dict[str, Any]


def unpack(archive: Path, folder: Path) -> UnpackedArchive:
    """Unpack an archive of torch-model-archiver (.mar) into a folder.

    Raises:
        ArchiveError: it is damaged, is not such an archive, or has a handler of its own.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(folder)  # drops `..` and roots, and creates no links
        model = json.loads((folder / _MANIFEST).read_bytes())["model"]
        handler = str(model["handler"])
        weights = folder / Path(str(model["serializedFile"])).name
        source = model.get("modelFile")
        config = model.get("configFile")
        settings = _batch_settings((folder / Path(config).name).read_text()) if config else {}
        if source:
            (folder / Path(source).name).rename(weights.with_suffix(".py"))
        weights.stat()
    except _DAMAGED as error:
        raise ArchiveError(
            archive.name,
            f"it is not an archive with a model file: {summarize(error)}",
            expected="a .mar file of torch-model-archiver with --serialized-file",
        ) from error
    if handler.removesuffix(".py") not in _HANDLERS:
        raise ArchiveError(
            archive.name,
            f"it has a handler of its own, {handler}",
            expected=f"one of TorchServe's: {', '.join(_HANDLERS)}",
            cure="Write its preprocess() and postprocess() into a class Hooks in hooks.py, and its"
            " inference() into forward() of a module in model.py: see docs/migrate.md.",
        )
    return UnpackedArchive(weights, settings)


def _batch_settings(text: str) -> dict[str, Any]:
    """Return the batch settings of model-config.yaml as entries of config.pbtxt."""
    size = re.search(_NUMBER.format("batchSize"), text)
    delay = re.search(_NUMBER.format("maxBatchDelay"), text)
    settings: dict[str, Any] = {}
    if size:
        settings["max_batch_size"] = max(1, int(size[1]))
    if delay:
        microseconds = 1000 * int(delay[1])
        settings["dynamic_batching"] = {"max_queue_delay_microseconds": microseconds}
    return settings
