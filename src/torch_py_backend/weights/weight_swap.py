"""Replacement of the weights of a loaded model: load the new ones, compare them, swap them."""

from __future__ import annotations

import contextlib
import dataclasses
import zipfile
from collections.abc import Mapping

import torch
from torch import Tensor

from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, ConfigError, WeightsError
from torch_py_backend.loading import mapped_files, package_weights, registry
from torch_py_backend.loading.loaded import Loaded


def refuse_unsupported(config: ModelConfig, loaded: Loaded) -> None:
    """Refuse WATCH_WEIGHTS for a model whose weights cannot be replaced without a reload.

    Raises:
        ConfigError: they cannot be replaced.
    """
    tensors, artifact = weights(loaded), loaded.artifact
    causes = (
        (
            loaded.kind is ArtifactType.AOTI and loaded.owner is None,
            "the AOTInductor package contains its weights",
        ),
        (not tensors, "the model has no weights outside of its code"),
        (config.options.freezes, "freezing makes them constants of a graph"),
        (
            loaded.kind in (ArtifactType.MODULE, ArtifactType.FACTORY) and artifact.weights is None,
            "there is no file of weights beside the model",
        ),
        (
            loaded.kind is ArtifactType.TORCHSCRIPT and _has_other_tensors(artifact, tensors),
            f"{artifact.path.name} holds tensors that are not parameters or buffers",
        ),
    )
    for holds, cause in causes:
        if holds:
            raise ConfigError(
                config.name, f"WATCH_WEIGHTS is set, and {cause}", cure="Remove WATCH_WEIGHTS."
            )


def _has_other_tensors(artifact: Artifact, weights: Mapping[str, Tensor]) -> bool:
    """Return whether an archive has more tensors with values than a model has weights."""
    tensors = filter(mapped_files.has_plain_storage, weights.values())
    storages = {mapped_files.storage_id(tensor) for tensor in tensors}
    with zipfile.ZipFile(artifact.path) as archive:
        members = archive.infolist()
    count = sum(_is_weight(member.filename) and member.file_size > 0 for member in members)
    return count > len(storages)


def weights(loaded: Loaded) -> dict[str, Tensor]:
    """Return a model's state_dict: its own tensors, not copies."""
    state = {} if loaded.owner is None else loaded.owner.state_dict(keep_vars=True)
    # Without the values of get_extra_state().
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def read(config: ModelConfig, loaded: Loaded) -> Loaded:
    """Load the current files on the CPU, beside the model that is served.

    Raises:
        LoadError: they cannot be loaded.
        WeightsError: names, shapes or dtypes differ from those of the model that is served.
    """
    cpu = torch.device("cpu")
    if loaded.kind is ArtifactType.AOTI:  # not another library, which may need another device
        owner = package_weights.read(config, loaded.artifact, cpu)
        replacement = dataclasses.replace(loaded, owner=owner)
    else:
        replacement = registry.load(loaded.artifact, config, cpu)
        registry.convert_weights(config, replacement)
    _compare(config, loaded.artifact, weights(loaded), weights(replacement))
    return replacement


def _compare(
    config: ModelConfig, artifact: Artifact, old: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> None:
    shapes = [
        f"{name} {_described(new[name])} instead of {_described(tensor)}"
        for name, tensor in old.items()
        if name in new and _described(new[name]) != _described(tensor)
    ]
    missing = [name for name in old if name not in new]
    unexpected = [name for name in new if name not in old]
    if missing or unexpected or shapes:
        file = (artifact.weights or artifact.path).name
        raise WeightsError(config.name, file, missing=missing, unexpected=unexpected, shapes=shapes)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def swap(config: ModelConfig, loaded: Loaded, replacement: Loaded) -> None:
    """Replace all weights of a model, or none; call it between two batches.

    On the CPU the model takes over their memory, and the memory of the old ones is freed. On a
    device, and where other tensors are views of a weight, they are copied into the old memory; the
    old values are kept until all are replaced.

    Raises:
        WeightsError: `forward()` has replaced a buffer, since `read`, by one of another form.
        Exception: an error of torch; the old weights are restored, except those that cannot be
            written.
    """
    old, new = weights(loaded), weights(replacement)
    _compare(config, loaded.artifact, old, new)
    devices = {tensor.device for tensor in old.values() if tensor.is_cuda}

    def wait() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    # These copies and the model's own stream do not wait for each other, and between two responses
    # a stream may still compute with the old weights.
    wait()
    # A buffer that forward() created in inference mode can only be written in inference mode.
    with torch.inference_mode():
        try:
            # Calls all of its functions after an error, also if some of them raise.
            with contextlib.ExitStack() as undo:
                for name, tensor in old.items():
                    plain = all(map(mapped_files.has_plain_storage, (tensor, new[name])))
                    on_cpu = tensor.device.type == "cpu"
                    if plain and on_cpu and mapped_files.has_no_other_views(tensor):
                        undo.callback(mapped_files.alias, tensor, tensor.detach())
                        mapped_files.alias(tensor, new[name])
                    else:
                        undo.callback(tensor.copy_, _backup(tensor))
                        tensor.copy_(new[name])
                undo.pop_all()
        finally:
            loaded.weights_moved()
            wait()


def _backup(tensor: Tensor) -> Tensor:
    try:
        return tensor.clone()
    except torch.OutOfMemoryError:  # a GPU without memory for both
        return tensor.cpu()


# --- members of archives ---------------------------------------------------------------------

_INCIDENTAL = (".debug_pkl", "/version", "/byteorder", "/serialization_id", "/archive_format")


def code_checksums(artifact: Artifact) -> dict[str, int]:
    """Return the checksums of an archive's members that are not weights."""
    if artifact.kind not in (ArtifactType.TORCHSCRIPT, ArtifactType.EXPORTED):
        return {}
    with zipfile.ZipFile(artifact.path) as archive:
        return {
            member.filename.partition("/")[2]: member.CRC
            for member in archive.infolist()
            if not _is_weight(member.filename)
            and not member.filename.endswith(_INCIDENTAL)
            and "/data/sample_inputs/" not in member.filename
        }


def refuse_changed_code(config: ModelConfig, artifact: Artifact, old: Mapping[str, int]) -> None:
    """Refuse an archive whose code differs from the old checksums: it needs a reload.

    Raises:
        ArtifactError: the code has changed.
    """
    new = code_checksums(artifact)
    changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if changed:
        raise ArtifactError(
            config.name,
            f"{artifact.path.name} differs in more than its weights: {', '.join(changed[:3])}",
            cure="Load the model again.",
        )


def _is_weight(member: str) -> bool:
    folder, _, name = member.partition("/")[2].rpartition("/")
    return (folder == "data" and name.isdigit()) or (
        folder == "data/weights" and not name.endswith(".json")
    )
