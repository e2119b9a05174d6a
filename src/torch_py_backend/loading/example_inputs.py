"""Example inputs of a model, for completing its config, warming it up and tuning it."""

from __future__ import annotations

from typing import Any

import numpy as np
import safetensors
import safetensors.torch
from torch import Tensor

from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.batching.gather_scatter import Item, Strings, Value
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, SourceError, summarize
from torch_py_backend.loading import python_source

NAME = "example_inputs"


def find(config: ModelConfig, artifact: Artifact) -> Item | None:
    """Return example inputs by name; None: there are none.

    They are in a file beside the model, or a function in model.py returns them. Those of a
    TorchServe archive are request bodies: a folder with a file for each input.

    Raises:
        ArtifactError: the file is damaged.
        SourceError: the function fails, or returns something else.
    """
    path = config.version_folder / f"{NAME}.safetensors"
    if path.is_file():
        try:
            return dict(safetensors.torch.load_file(path))
        except (safetensors.SafetensorError, OSError) as error:
            raise ArtifactError(
                config.name,
                f"{path.name} is not valid safetensors: {summarize(error)}",
                cure="Write it with safetensors.torch.save_file.",
            ) from error
    if artifact.kind is ArtifactType.TORCHSERVE:
        return _request_bodies(config)
    source = artifact.path if artifact.kind is ArtifactType.MODULE else artifact.hooks
    if source is None:
        return None
    inputs = python_source.example_inputs(config.name, source, NAME)
    if inputs is None:
        return None
    return {name: _value(config, name, value) for name, value in inputs.items()}


def _request_bodies(config: ModelConfig) -> Item | None:
    folder = config.version_folder / NAME
    shape = (1, 1) if config.max_batch_size else (1,)
    bodies: Item = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        body: Strings = np.empty(shape, dtype=np.object_)
        body.fill(path.read_bytes())
        bodies[path.name] = body
    return bodies or None


def _value(config: ModelConfig, name: str, value: Any) -> Value:
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value, dtype=np.object_)
    if all(isinstance(element, str | bytes) for element in array.flat):
        return array
    raise SourceError(
        config.name,
        f"{NAME}() gives a {type(value).__name__} for '{name}'",
        expected="a tensor, or a list of strings",
    )
