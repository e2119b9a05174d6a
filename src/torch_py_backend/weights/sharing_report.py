"""Report of how much of a model's weights its instances share, and why the rest is not shared."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch_py_backend.artifacts import discovery
from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError
from torch_py_backend.loading import mapped_files
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.loading.mapped_files import Mapped
from torch_py_backend.weights import gpu_sharing

log = logging.getLogger(__name__)

# Copies of fewer bytes are not logged.
_MIN_LOGGED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Sharing:
    """How much of its weights an instance shares with the others of its machine.

    Attributes:
        mapped: the weights in mapped files.
        obstacle: why this instance has a copy of the rest; empty: it has none.
        on_gpu: the weights are shared on a GPU instead, once the model is there.
    """

    mapped: Mapped
    obstacle: str
    on_gpu: bool = False

    def __str__(self) -> str:
        shared = self.mapped.total if self.on_gpu else self.mapped.shared
        where = "the instances on a GPU" if self.on_gpu else "the instances"
        sizes = f"{shared / 1e6:,.1f} MB of {self.mapped.total / 1e6:,.1f} MB"
        return f"{sizes} shared by {where}" + (f"; {self.obstacle}" if self.obstacle else "")


def report(config: ModelConfig, loaded: Loaded) -> Sharing:
    """Return how much of a model's weights is shared, once it has its final form.

    Raises:
        ConfigError: ENABLE_WEIGHT_SHARING is true, and some weights are not shared.
    """
    weights = mapped(loaded)
    if gpu_sharing.requested(config):
        return Sharing(weights, "", on_gpu=True)
    sharing = Sharing(weights, _obstacle(config, loaded, weights))
    if sharing.obstacle and config.options.enable_weight_sharing:
        raise ConfigError(
            config.name,
            f"ENABLE_WEIGHT_SHARING is true, and only {sharing}",
            cure="Remove what stands in the way, or remove ENABLE_WEIGHT_SHARING.",
        )
    if (
        sharing.obstacle
        and weights.total - weights.shared >= _MIN_LOGGED_BYTES
        and config.kind == "CPU"
    ):
        log.info("model '%s': weights: %s.", config.name, sharing)
    return sharing


def mapped(loaded: Loaded) -> Mapped:
    """Return which of a model's weights are in mapped files.

    Buffers that a module computes when it is built are not in the files: each instance has its own.
    """
    owner = loaded.owner
    return mapped_files.measure([] if owner is None else owner.state_dict(keep_vars=True).values())


def _obstacle(config: ModelConfig, loaded: Loaded, weights: Mapped) -> str:
    """Return why not all weights are in mapped files; empty: they are."""
    if loaded.kind is ArtifactType.AOTI:
        return "the AOTInductor package contains them"
    if config.options.freezes:
        return "freezing makes them constants of a graph"
    if weights.shared == weights.total:
        return ""
    if config.kind != "CPU" and config.options.enable_weight_sharing is not False:
        return "each instance has a copy on its device"
    obstacle = "the module converts or computes the rest, or holds views of it"
    if config.options.optimize:
        obstacle = f"OPTIMIZE's {', '.join(config.options.optimize)} converts them"
    return discovery.mapping_obstacle(config, loaded.artifact) or obstacle
