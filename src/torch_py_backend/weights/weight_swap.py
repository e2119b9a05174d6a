"""New weights for a model that serves: read beside the old ones, compared, put in their place."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from torch_py_backend.artifacts.discovery import Artifact, Kind
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, ConfigError, WeightsError
from torch_py_backend.loading import mapped_files, optimization, registry
from torch_py_backend.loading.loaded import Loaded


def refuse_impossible(config: ModelConfig, artifact: Artifact, loaded: Loaded) -> None:
    """Refuse WATCH_WEIGHTS for a model whose weights cannot be replaced alone.

    Raises:
        ConfigError: it is such a model.
    """
    own = weights(loaded)
    causes = (
        (loaded.kind is Kind.AOTI, "an AOTInductor package keeps its weights to itself"),
        (loaded.kind is Kind.TORCHSERVE, "the handler of a TorchServe archive reads them itself"),
        (not own, "the model has no weights outside of its code"),
        ("freeze" in config.options.optimize, "OPTIMIZE's freeze makes them constants of a graph"),
        (
            loaded.kind in (Kind.MODULE, Kind.FACTORY) and artifact.weights is None,
            "no file of weights lies beside the model",
        ),
        (
            loaded.kind is Kind.TORCHSCRIPT and _strays(artifact, own),
            f"{artifact.path.name} holds tensors that are no parameters or buffers",
        ),
    )
    for holds, cause in causes:
        if holds:
            raise ConfigError(
                config.name, f"WATCH_WEIGHTS is set, and {cause}", cure="Take WATCH_WEIGHTS out."
            )


def _strays(artifact: Artifact, own: Mapping[str, Tensor]) -> bool:
    storages = {mapped_files.storage_id(one) for one in own.values() if mapped_files.is_plain(one)}
    with zipfile.ZipFile(artifact.path) as archive:
        records = [one for one in archive.infolist() if _is_weight(one.filename) and one.file_size]
    return len(records) > len(storages)


def weights(loaded: Loaded) -> dict[str, Tensor]:
    """A model's weights as its file names them; the model's own tensors, not copies."""
    state = {} if loaded.owner is None else loaded.owner.state_dict(keep_vars=True)
    # What a module keeps there beside tensors (get_extra_state) is none.
    return {name: one for name, one in state.items() if isinstance(one, Tensor)}


def read(config: ModelConfig, artifact: Artifact, loaded: Loaded) -> Loaded:
    """What lies in the files now, loaded on the CPU beside the model that is serving.

    Raises:
        LoadError: it cannot be loaded.
        WeightsError: it has other names, shapes or types than the model that is serving.
    """
    fresh = registry.load(artifact, config, torch.device("cpu"))
    optimization.lay_out(config, fresh)
    _compare(config, artifact, weights(loaded), weights(fresh))
    return fresh


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


def put(config: ModelConfig, artifact: Artifact, loaded: Loaded, fresh: Loaded) -> None:
    """Give the model the fresh weights, all or none; between two batches.

    On the CPU they stay where they lie, and the memory of the old ones is given back. On a device,
    and where something else holds a view of a weight, they are copied into the old one's place; of
    the old values a copy is kept until all are in place.

    Raises:
        WeightsError: `forward()` has replaced a buffer, since `read`, by one of another form.
        Exception: whatever torch raises; the old weights are in force again.
    """
    old, new = weights(loaded), weights(fresh)
    _compare(config, artifact, old, new)
    undo: list[Callable[[], object]] = []
    # A buffer that forward() has made in inference mode is only written within it.
    with torch.inference_mode():
        try:
            for name, tensor in old.items():
                if _movable(tensor, new[name]):
                    undo.append(partial(mapped_files.alias, tensor, tensor.detach()))
                    mapped_files.alias(tensor, new[name])
                else:
                    undo.append(partial(tensor.copy_, _copy(tensor)))
                    tensor.copy_(new[name])
        except BaseException:
            for restore in reversed(undo):
                restore()
            raise


def _copy(tensor: Tensor) -> Tensor:
    try:
        return tensor.clone()
    except torch.OutOfMemoryError:  # a GPU that does not hold the weights twice
        return tensor.cpu()


def _movable(tensor: Tensor, fresh: Tensor) -> bool:
    plain = mapped_files.is_plain(tensor) and mapped_files.is_plain(fresh)
    return plain and tensor.device.type == "cpu" and mapped_files.is_alone(tensor)


def code(artifact: Artifact) -> dict[str, int]:
    """What of an archive is not weights, by checksums; a change of that is no change of weights."""
    if artifact.kind not in (Kind.TORCHSCRIPT, Kind.EXPORTED):
        return {}
    with zipfile.ZipFile(artifact.path) as archive:
        return {
            member.filename.partition("/")[2]: member.CRC
            for member in archive.infolist()
            if not _is_weight(member.filename) and not _is_incidental(member.filename)
        }


def refuse_other_code(config: ModelConfig, artifact: Artifact, known: Mapping[str, int]) -> None:
    """Refuse an archive whose code is another one: it needs a reload.

    Raises:
        ArtifactError: it is.
    """
    now = code(artifact)
    changed = sorted(name for name in {*known, *now} if known.get(name) != now.get(name))
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


_INCIDENTAL = (".debug_pkl", "/version", "/byteorder", "/serialization_id", "/archive_format")


def _is_incidental(member: str) -> bool:
    return member.endswith(_INCIDENTAL) or "/data/sample_inputs/" in member
