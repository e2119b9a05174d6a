"""Files of weights, read without executing code, and loaded into modules.

Files are mapped. Where a module loads a weight unchanged, the weight stays in the mapped file: see
`mapped_files`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_py_backend.artifacts import file_types
from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.artifacts.file_types import FileType
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, WeightsError, summarize
from torch_py_backend.loading import mapped_files


def load_into(config: ModelConfig, artifact: Artifact, module: nn.Module) -> None:
    """Load the weights into the module: all keys, no other keys, the same shapes.

    Raises:
        ArtifactError: there is no file of weights, or it cannot be read.
        WeightsError: its keys or shapes are not those of the module.
    """
    own = module.state_dict(keep_vars=True)
    if artifact.weights is None:
        if not own:
            return
        raise ArtifactError(
            config.name,
            f"{type(module).__name__} has {len(own)} weights, and there is no weights file beside"
            f" {artifact.path.name}",
            expected=f"{artifact.path.stem}.safetensors, .pt or .pth",
            cure='Save module.state_dict() there, or set the parameter WEIGHTS to "none".',
        )
    state = _read_weights(config, artifact.weights)
    file = artifact.weights.name
    shapes = _wrong_shapes(own, state)
    if shapes:
        raise WeightsError(
            config.name,
            file,
            missing=_without_twins([key for key in own if key not in state], own, state),
            unexpected=[key for key in state if key not in own],
            shapes=shapes,
        )
    try:
        # The module compares the keys: it may translate old names and add missing values.
        with _sharing(config, artifact.weights, state):
            result = module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ArtifactError(
            config.name,
            f"the weights {file} do not fit {type(module).__name__}: {summarize(error)}",
        ) from error
    missing = _without_twins(result.missing_keys, own, state)
    if missing or result.unexpected_keys:
        raise WeightsError(config.name, file, missing=missing, unexpected=result.unexpected_keys)


def _sharing(
    config: ModelConfig, path: Path, state: Mapping[str, Tensor]
) -> contextlib.AbstractContextManager[Any]:
    if config.options.enable_weight_sharing is False or file_types.mmap_obstacle(path):
        return contextlib.nullcontext()
    return mapped_files.AliasOnCopy(state.values())


def _without_twins(
    missing: Sequence[str], own: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> list[str]:
    """Return the missing keys without those of tied weights that have another name in the file."""
    present = {id(tensor) for key, tensor in own.items() if key in state}
    return [key for key in missing if id(own.get(key)) not in present]


def _wrong_shapes(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    return [
        f"{key} {list(state[key].shape)} instead of {list(tensor.shape)}"
        for key, tensor in own.items()
        # A lazy module gets its shapes from the file.
        if key in state and not is_lazy(tensor) and state[key].shape != tensor.shape
    ]


def _read_weights(config: ModelConfig, path: Path) -> Mapping[str, Tensor]:
    if path.suffix == ".safetensors":
        return _read_safetensors(config, path)
    if path.suffix == ".json":
        return _read_shards(config, path)
    try:
        content = file_types.file_type(path)
    except OSError as error:
        raise ArtifactError(
            config.name, f"the weights {path.name} cannot be read: {summarize(error)}"
        ) from error
    if content is not FileType.STATE_DICT:
        raise ArtifactError(
            config.name,
            f"the weights {path.name} are {content.value}",
            expected="a state_dict that torch.save wrote, or safetensors",
            cure="Save module.state_dict() there.",
        )
    try:
        # Compressed entries cannot be mapped: their compressed bytes would be read as values.
        state = torch.load(
            path, map_location="cpu", mmap=not file_types.mmap_obstacle(path), weights_only=True
        )
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ArtifactError(
            config.name,
            f"the weights {path.name} cannot be read with weights_only: {summarize(error)}",
            expected="a state_dict of plain tensors",
            cure="Save module.state_dict() there, or convert it to safetensors.",
        ) from error
    if not _is_state_dict(state):
        entries = state if isinstance(state, Mapping) else {}
        inner = [key for key in ("state_dict", "model") if _is_state_dict(entries.get(key))]
        raise ArtifactError(
            config.name,
            f"the weights {path.name} hold a {type(state).__name__} that is not a state_dict",
            expected="tensors by name",
            cure=f"Save its entry '{inner[0]}' alone." if inner else "Save module.state_dict().",
        )
    tensors: Mapping[str, Tensor] = state
    return tensors


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in value.items()
    )


def _read_shards(config: ModelConfig, index: Path) -> Mapping[str, Tensor]:
    """Return the weights of all shards that an index names."""
    try:
        files = file_types.shards(index)
    except file_types.INDEX_ERRORS as error:
        raise ArtifactError(
            config.name,
            f"the weights {index.name} are not an index of safetensors: {summarize(error)}",
            expected="a JSON object with a weight_map from keys to files",
        ) from error
    # If the index is a link, its shards may be links into the folder of its target.
    folders = (config.folder.resolve(), index.resolve().parent)
    state: dict[str, Tensor] = {}
    for name in files:
        path = index.parent / name
        try:
            inside = any(path.resolve().is_relative_to(folder) for folder in folders)
            exists = inside and path.is_file()
        except (OSError, ValueError, RuntimeError):  # too long, a NUL, circular links
            exists = False
        if not exists:
            raise ArtifactError(
                config.name,
                f"the weights {index.name} name {name}",
                expected="a file beside the index",
            )
        state |= _read_safetensors(config, path)
    return state


def _read_safetensors(config: ModelConfig, path: Path) -> Mapping[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise ArtifactError(
            config.name,
            f"the weights {path.name} are not valid safetensors: {summarize(error)}",
            cure="Write them again with safetensors.torch.save_file, or copy them again.",
        ) from error
