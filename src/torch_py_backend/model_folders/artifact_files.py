"""The files that `init` puts into a version folder, found from a user's path. Imports no torch."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch_py_backend.config import pbtxt
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.errors import ArtifactError, printable, summarize
from torch_py_backend.loading import discovery
from torch_py_backend.loading.discovery import HOOKS, ArtifactType

EXAMPLE = "example_inputs.safetensors"
# The handlers of TorchServe itself, which are not part of an archive.
_HANDLERS = ("base_handler", "image_classifier", "image_segmenter", "object_detector")
# Numbers of model-config.yaml, for which a YAML parser would be a dependency.
_NUMBER = re.compile(r"^(batchSize|maxBatchDelay):[ \t]*(\d{1,9})[ \t]*(?:#.*)?$", re.MULTILINE)
_OPTIONAL = ("attention_mask", "token_type_ids")
_TEXT_HOOKS = Path(__file__).parents[1] / "saving" / "text_hooks.py"


def unpack_archive(archive: Path, folder: Path) -> tuple[Path, JsonObject]:
    """Unpack an archive of torch-model-archiver; return its model file, and entries of a config."""
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
    numbers = {key: int(digits) for key, digits in _NUMBER.findall(text)}
    needs: JsonObject = {}
    if rows := numbers.get("batchSize"):
        delay = 1000 * numbers.get("maxBatchDelay", 0)
        needs["max_batch_size"] = rows
        needs["dynamic_batching"] = {"max_queue_delay_microseconds": delay}
    return weights, needs


def find(path: Path) -> dict[str, Path]:
    """Return the files of an artifact by their names in the version folder, the model's first."""
    artifact = discovery.of_file(path)
    source = path.with_name("model.py")
    if artifact.kind is ArtifactType.MODULE:
        weights = None if path == artifact.path else path
        files = discovery.source_files(artifact.path, weights)
    else:
        name = "model.pt" if artifact.kind is ArtifactType.TORCHSCRIPT else "model.pt2"
        files = {name: path}
        if source.is_file() and not discovery.defines_module(source):
            files |= discovery.imported(path.parent, "model")
    if path.with_name(HOOKS).is_file():
        files |= discovery.imported(path.parent, "hooks")
    if path.with_name(EXAMPLE).is_file():
        files[EXAMPLE] = path.with_name(EXAMPLE)
    return files


def find_pretrained(
    folder: Path,
    *,
    tensors: bool,
) -> tuple[dict[str, Path], JsonObject]:
    """Return the files of a folder of `save_pretrained`, and what they need in config.pbtxt.

    Without `tensors`, or an example, a classifier with a tokenizer gets hooks that take texts.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
        (architecture, *_) = config.get("architectures") or ["AutoModel"]
        # A path of attributes could lead out of the package, such as `transformers:os.system`.
        if not str(architecture).isidentifier():
            raise ValueError(architecture)
    except (OSError, ValueError, AttributeError, TypeError):
        raise ArtifactError(
            f"{folder} is a folder without a config.json of transformers",
            expected="a model's file, or a folder that save_pretrained wrote",
        ) from None
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    files = {path.name: path for path in paths if not path.name.startswith(".")}
    factory = {"MODEL_FACTORY": f"transformers:{architecture}"}
    needs: JsonObject = {"parameters": pbtxt.parameters(factory)}
    takes_texts = "tokenizer_config.json" in files and files.keys().isdisjoint({HOOKS, EXAMPLE})
    if takes_texts and not tensors and architecture.endswith("ForSequenceClassification"):
        files[HOOKS] = _TEXT_HOOKS
        needs["input"] = [{"name": "text", "data_type": "TYPE_STRING", "dims": [1]}]
    return files, needs


def pretrained_kwargs(arguments: Iterable[str]) -> JsonObject:
    """Return arguments of a transformers model without which it would return its cache."""
    # The argument that takes the cache is `cache` from transformers 5.24 on.
    return {"use_cache": False} if {"past_key_values", "cache"} & {*arguments} else {}


def pretrained_inputs(
    config: Document,
    arguments: Sequence[str],
) -> list[JsonObject]:
    """Return the inputs of a transformers model that takes tokens; empty for other models.

    `config` is config.json. `arguments` are those of `forward()`.
    """
    names = ["input_ids", "attention_mask"]
    if config.get("is_encoder_decoder"):
        names.append("decoder_input_ids")
    if config.get("type_vocab_size", 0) > 1:
        names.append("token_type_ids")
    return [
        {
            "name": name,
            "data_type": "TYPE_INT64",
            "dims": [-1],
            "optional": name in _OPTIONAL,
        }
        for name in names
        if "input_ids" in arguments and name in arguments
    ]


def pad(config: Document, document: JsonObject) -> None:
    """Let requests of different lengths share a batch, if the model has a token to pad with.

    `config` is config.json. `document`, with its `pretrained_inputs`, is changed in place.
    """
    token = config.get("pad_token_id")
    names = [entry["name"] for entry in document["input"] if -1 in entry["dims"]]
    pads = "attention_mask" in names and not config.get("is_encoder_decoder")
    if token is None or not pads or not document["max_batch_size"]:
        return
    as_long = [entry["name"] for entry in document["output"] if -1 in entry["dims"]]
    settings: dict[str, JsonObject] = {name: {} for name in names if name != "attention_mask"}
    settings["input_ids"] = {"value": token, "mask": "attention_mask", "outputs": as_long}
    document["parameters"] |= pbtxt.parameters({"PAD": settings})
    for entry in document["input"]:
        entry["allow_ragged_batch"] = True


def write_labels(
    config: Document,
    document: JsonObject,
    folder: Path,
) -> None:
    """Write the labels of a classifier into its model folder, as Triton's `label_filename`."""
    labels = config.get("id2label") or {}
    for entry in document["output"]:
        if labels and entry["name"] == "logits" and entry["dims"] == [len(labels)]:
            entry["label_filename"] = "labels.txt"
            lines = [f"{labels[key]}\n" for key in sorted(labels, key=int)]
            (folder / "labels.txt").write_text("".join(lines), encoding="utf-8")
