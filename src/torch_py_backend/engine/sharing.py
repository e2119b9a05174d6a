"""What instances share of a model's weights, and whether its mapped files stay as they were."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine import gpu_sharing
from torch_py_backend.errors import ConfigError
from torch_py_backend.loading import discovery, mapped_files
from torch_py_backend.loading.discovery import ArtifactType
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.loading.mapped_files import Mapped

# Seconds between two looks at mapped files.
_PERIOD_S = 1.0


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
            f"ENABLE_WEIGHT_SHARING is true, and only {sharing}",
            cure="Remove what stands in the way, or remove ENABLE_WEIGHT_SHARING.",
        )
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


class MappedFiles:
    """The files of a model's weights, whose contents must stay as they were mapped.

    A file that is replaced by renaming keeps its pages for the processes that have mapped it.
    Writing over it in place, as `cp` does, changes the weights during a request; truncating it ends
    a process that reads them with SIGBUS.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._states = {path: _state(path) for path in paths}
        self._due = 0.0

    def changed(self) -> str:
        """Return the name of a file that was written; empty: none was, or the last look is new.

        The files are looked at once a second.
        """
        now = time.monotonic()
        if now < self._due:
            return ""
        self._due = now + _PERIOD_S
        for path, before in self._states.items():
            state = _state(path)
            if state != before and state[:1] == before[:1]:
                return path.name
        return ""


def _state(path: Path) -> tuple[int, ...]:
    """Return the number of a file, which differs if it is replaced, its time and its size."""
    with contextlib.suppress(OSError):  # it was removed
        status = path.stat()
        return status.st_ino, status.st_mtime_ns, status.st_size
    return ()
