"""A loaded model, and checks of options that loaders share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.batching.gather_scatter import ANY_ROWS, Rows
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.config.options import Options
from torch_py_backend.errors import ConfigError
from torch_py_backend.signature.arguments import Signature

log = logging.getLogger(__name__)

# A user's forward(), or what is called in its place: it takes and returns anything.
Forward: TypeAlias = "Callable[..., Any]"
# The forward() of modules that define none, such as ModuleList.
NO_FORWARD = nn.Module.forward


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model.

    Attributes:
        artifact: the artifact that was loaded.
        module: the callable for inputs.
        signature: the inputs of `module`.
        owner: the module with its parameters and buffers; None: it has none, or they are hidden.
        rows: how many rows one call accepts.
        step: advances several streams at once; `module` begins one then.
        close: removes temporary files. May be called several times.
    """

    artifact: Artifact
    module: Forward
    signature: Signature
    owner: nn.Module | None = None
    rows: Rows = ANY_ROWS
    step: Callable[[list[Any]], Any] | None = None
    close: Callable[[], object] = lambda: None

    @property
    def kind(self) -> ArtifactType:
        """The type of the artifact."""
        return self.artifact.kind

    @property
    def returns(self) -> str:
        """The name of the function that returns the outputs."""
        return self.signature.name if self.step is None else "step"

    @property
    def weights(self) -> Iterator[Tensor]:
        """The parameters and buffers."""
        if self.owner is not None:
            yield from self.owner.parameters()
            yield from self.owner.buffers()


def refuse_method(artifact: Artifact, config: ModelConfig) -> None:
    """Raise ConfigError if METHOD is set, for an artifact that has one function only."""
    if config.options.method is not None:
        raise ConfigError(
            config.name,
            f"METHOD is set, and {artifact.path.name} is {artifact.kind.value}",
            cure="It holds one method, the one that was exported; remove METHOD.",
        )


def warn_unused(config: ModelConfig, *fields: str) -> None:
    """Log a warning for each of these options that differs from its default."""
    for field in fields:
        if getattr(config.options, field) != getattr(Options(), field):
            log.warning(
                "model '%s': the parameter %s has no effect: the artifact is complete in itself.",
                config.name,
                field.upper(),
            )
