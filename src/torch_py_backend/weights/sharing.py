"""Whether the instances of a model share one copy of its weights, and if not, why."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch_py_backend.artifacts import file_types
from torch_py_backend.artifacts.discovery import Artifact, Kind
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError
from torch_py_backend.loading import mapped_files
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.loading.mapped_files import Mapped
from torch_py_backend.weights import gpu_sharing

log = logging.getLogger(__name__)

# What is not worth a line in the log.
_SMALL = 1 << 20


@dataclass(frozen=True, slots=True)
class Sharing:
    """Bytes of weights that this instance shares with the others of its machine.

    Attributes:
        mapped: which lie in mapped files.
        obstacle: why the rest is a copy of this instance's own; empty where there is none.
        on_gpu: they are shared on a GPU instead, once the model is there.
    """

    mapped: Mapped
    obstacle: str
    on_gpu: bool = False

    def __str__(self) -> str:
        shared = self.mapped.total if self.on_gpu else self.mapped.shared
        where = "the instances on a GPU" if self.on_gpu else "the instances"
        told = f"{_size(shared)} of {_size(self.mapped.total)} shared by {where}"
        return f"{told}; {self.obstacle}" if self.obstacle else told


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def settle(config: ModelConfig, artifact: Artifact, loaded: Loaded) -> Sharing:
    """What became of the wish to share, once the model is as it will be called.

    Raises:
        ConfigError: ENABLE_WEIGHT_SHARING is true, and some weights are not shared.
    """
    found = mapped(loaded)
    if gpu_sharing.wished(config):
        return Sharing(found, "", on_gpu=True)
    settled = Sharing(found, _obstacle(config, artifact, loaded, found))
    if settled.obstacle and config.options.enable_weight_sharing:
        raise ConfigError(
            config.name,
            f"ENABLE_WEIGHT_SHARING is true, and only {settled}",
            cure="Remove what stands in the way, or take ENABLE_WEIGHT_SHARING out.",
        )
    if settled.obstacle and found.total - found.shared >= _SMALL and config.kind == "CPU":
        log.info("model '%s': weights: %s.", config.name, settled)
    return settled


def mapped(loaded: Loaded) -> Mapped:
    """Which of a model's weights lie in files now.

    Buffers that are computed when a module is built are in no file, and each instance's own.
    """
    owner = loaded.owner
    return mapped_files.find([] if owner is None else owner.state_dict(keep_vars=True).values())


def _obstacle(config: ModelConfig, artifact: Artifact, loaded: Loaded, found: Mapped) -> str:
    optimize = config.options.optimize
    if loaded.kind is Kind.AOTI:
        return "an AOTInductor package keeps its weights to itself"
    if "freeze" in optimize:
        return "OPTIMIZE's freeze makes them constants of a graph"
    if found.shared == found.total:
        return ""
    file = artifact.weights
    unmappable = file_types.unmappable(file) if file is not None else ""
    causes = (
        (config.options.enable_weight_sharing is False, "ENABLE_WEIGHT_SHARING is false"),
        (config.kind != "CPU", "each instance has a copy on its device"),
        (artifact.weightless, "WEIGHTS is none: they are computed when the module is built"),
        (bool(unmappable), unmappable),
        (
            "channels_last" in optimize,
            "OPTIMIZE's channels_last lays the weights of convolutions out anew",
        ),
    )
    otherwise = "the module converts or computes the rest, or holds views of it"
    return next((cause for holds, cause in causes if holds), otherwise)
