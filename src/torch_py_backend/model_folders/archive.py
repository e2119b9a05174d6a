"""Archives of TorchServe (.mar), unpacked for `init`."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

from torch_py_backend.config.pbtxt import JsonObject
from torch_py_backend.errors import ArtifactError, printable, summarize

# The handlers of TorchServe itself, which are not part of an archive.
_HANDLERS = ("base_handler", "image_classifier", "image_segmenter", "object_detector")
# Numbers of model-config.yaml, for which a YAML parser would be a dependency.
_BATCH_SETTING = re.compile(
    r"^(batchSize|maxBatchDelay):[ \t]*(\d{1,9})[ \t]*(?:#.*)?$", re.MULTILINE
)


def unpack(archive: Path, folder: Path) -> tuple[Path, JsonObject]:
    """Unpack an archive of torch-model-archiver.

    Return the file of TorchScript, or of weights with a source file of the same name beside it; and
    entries of config.pbtxt for a model with a batch dimension.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(folder)  # drops `..` and roots, and creates no links
        model = json.loads((folder / "MAR-INF" / "MANIFEST.json").read_bytes())["model"]
        handler = str(model["handler"])
        weights = folder / Path(model["serializedFile"]).name
        weights.stat()
        if source := model.get("modelFile"):
            (folder / Path(source).name).rename(weights.with_suffix(".py"))
        config = model.get("configFile")
        text = (folder / Path(config).name).read_text() if config else ""
    except Exception as error:  # of zipfile, its decompressors, or a manifest of another form
        raise ArtifactError(
            f"it is not an archive with a model file: {summarize(error)}",
            expected="a .mar file of torch-model-archiver with --serialized-file",
        ) from error
    if handler.removesuffix(".py") not in _HANDLERS:
        raise ArtifactError(
            f"it has a handler of its own, {printable(handler)}",
            expected=f"one of TorchServe's: {', '.join(_HANDLERS)}",
            cure="Write its methods into hooks.py and model.py: see docs/migrate.md.",
        )
    numbers = {key: int(digits) for key, digits in _BATCH_SETTING.findall(text)}
    settings: JsonObject = {}
    if numbers.get("batchSize"):
        settings["max_batch_size"] = numbers["batchSize"]
    if "maxBatchDelay" in numbers:
        delay = 1000 * numbers["maxBatchDelay"]
        settings["dynamic_batching"] = {"max_queue_delay_microseconds": delay}
    return weights, settings
