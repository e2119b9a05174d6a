"""The manifest and the settings of an unpacked TorchServe archive."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_py_backend.errors import ArchiveError, join_names, summarize
from torch_py_backend.torchserve.mar_archive import MANIFEST, safe_path

# Handlers of TorchServe that are supported here.
HANDLERS = ("base_handler", "image_classifier", "image_segmenter", "object_detector")
# What serves the models of other handlers of TorchServe.
_ALTERNATIVES = {
    "vllm_handler": "Triton's vLLM backend serves such models.",
    "trt_llm_handler": "Triton's TensorRT-LLM backend serves such models.",
    "dali_image_classifier": "Triton's DALI backend reads images on the GPU.",
    "text_classifier": "Serve the model with hooks that call a tokenizer, see docs/hooks.md.",
}
# The keys of a manifest that name files of the archive.
_FILE_KEYS = ("serializedFile", "modelFile", "requirementsFile", "configFile", "sourceVocab")

# Both files are read at once.
_MAX_BYTES = 1 << 20
# The most values in the settings.
_MAX_VALUES = 100_000


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of MAR-INF/MANIFEST.json.

    Attributes:
        archive: the archive's name in messages.
        folder: the folder of the unpacked archive.
        document: the JSON object.
        model_name: the name of the model.
        handler: a file or module of the archive, or a handler of TorchServe; with `:function`, a
            function in it.
        requirements_file: the required packages; empty: the manifest names none.
        config_file: settings in YAML; empty: the manifest names none.
    """

    archive: str
    folder: Path
    document: Mapping[str, object]
    model_name: str
    handler: str
    requirements_file: str
    config_file: str

    @classmethod
    def read(cls, folder: Path, archive: str) -> Manifest:
        """Read the manifest of an unpacked archive, whose name is for messages.

        Raises:
            ArchiveError: there is no manifest, or its model cannot be served.
        """
        try:
            document = json.loads(_read_bounded(archive, folder, str(MANIFEST)))
        except (ValueError, RecursionError) as error:
            raise ArchiveError(archive, f"{MANIFEST} is not JSON: {summarize(error)}") from None
        model = document.get("model") if isinstance(document, dict) else None
        if not isinstance(model, dict):
            raise ArchiveError(
                archive,
                f"{MANIFEST} has no object 'model'",
                cure="Of a workflow (.war), import the models, and join them with a Triton"
                " ensemble.",
            )
        runtime = str(document.get("runtime", "python"))
        if runtime.lower() not in ("python", "python3"):
            raise ArchiveError(
                archive, f"its runtime is '{runtime}'", expected="a handler written in Python"
            )
        files = {key: str(model.get(key) or "") for key in _FILE_KEYS}
        for key, name in files.items():
            if name and not (folder / safe_path(archive, name)).is_file():
                raise ArchiveError(
                    archive,
                    f"{MANIFEST} names the {key} {name}, which the archive does not hold",
                    cure="Create the archive again.",
                )
        for key in ("modelName", "handler"):
            if not isinstance(model.get(key), str) or not model[key].strip():
                raise ArchiveError(archive, f"{MANIFEST} has no text for '{key}'")
        manifest = cls(
            archive,
            folder,
            document,
            model_name=model["modelName"].strip(),
            handler=model["handler"].strip(),
            requirements_file=files["requirementsFile"],
            config_file=files["configFile"],
        )
        name = manifest.handler_module
        if not name.isidentifier() or not (name in HANDLERS or manifest.handler_is_included):
            raise ArchiveError(
                archive,
                f"its handler is '{manifest.handler}', which it does not hold",
                expected=f"a Python file in it, or one of {join_names(HANDLERS)}",
                cure=_ALTERNATIVES.get(name, ""),
            )
        return manifest

    @property
    def handler_module(self) -> str:
        """The name of the handler's module."""
        return self.handler.partition(":")[0].rpartition("/")[2].removesuffix(".py")

    @property
    def handler_function(self) -> str:
        """The name of the handler's function, which the module may lack."""
        return self.handler.partition(":")[2] or "handle"

    @property
    def handler_is_included(self) -> bool:
        """Whether the handler's module is in the archive; else it is one of TorchServe's."""
        module = self.folder / self.handler_module
        return module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()

    def settings(self) -> dict[str, object]:
        """Return the settings in the archive's model-config.yaml; empty without such a file.

        Raises:
            ArchiveError: it cannot be read.
        """
        if not self.config_file:
            return {}
        try:
            import yaml  # noqa: PLC0415  needed only for archives with settings
        except ImportError as error:
            raise ArchiveError(
                self.archive,
                f"{self.config_file} cannot be read: {error}",
                cure="pip install 'torch-py-backend[torchserve]'.",
            ) from None
        text = _read_bounded(self.archive, self.folder, self.config_file)
        try:
            root = yaml.compose(text, yaml.SafeLoader)
            if root is not None:
                _check_size(root)
            document = yaml.safe_load(text)
        except Exception as error:  # int(), datetime() and others parse its values
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ArchiveError(
                self.archive, f"{self.config_file} cannot be read: {reason}"
            ) from None
        if not isinstance(document, dict | None):
            raise ArchiveError(
                self.archive,
                f"{self.config_file} holds a {type(document).__name__}",
                expected="keys and values",
            )
        return document or {}


def _read_bounded(archive: str, folder: Path, name: str) -> bytes:
    path = folder / name
    if not path.is_file():
        raise ArchiveError(archive, f"it holds no {name}")
    if path.stat().st_size > _MAX_BYTES:
        raise ArchiveError(archive, f"{name} is too large", expected=f"at most {_MAX_BYTES} bytes")
    return path.read_bytes()


def _check_size(root: Any) -> None:
    """Check that at most `_MAX_VALUES` values would be constructed from PyYAML's nodes.

    With nested references, a kilobyte of YAML can stand for values that fill any memory.

    Raises:
        ValueError: there would be more.
    """
    pending, count = [root], 0
    while pending:
        value = pending.pop().value  # a text, nodes, or pairs of nodes
        count += 1
        if count + len(pending) > _MAX_VALUES:
            raise ValueError(f"references expand to more than {_MAX_VALUES} values")
        for node in value if isinstance(value, list) else ():
            pending += node if isinstance(node, tuple) else (node,)
