"""A loaded model, and the errors of files that torch cannot read as one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torch_py_backend.errors import ArtifactError, summarize
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.signature.arguments import Signature
from torch_py_backend.values import ANY_ROWS, Rows

# A user's forward(), or what is called in its place: it takes and returns anything.
Forward: TypeAlias = "Callable[..., Any]"


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


@contextlib.contextmanager
def reading(path: Path, kind: ArtifactType) -> Iterator[None]:
    """Raise an ArtifactError for a file that torch cannot read in the context."""
    try:
        yield
    except Exception as error:  # a damaged file, or one of another torch, raises nearly anything
        raise ArtifactError(
            f"{path.name} is {kind.value} that torch {torch.__version__} cannot load:"
            f" {summarize(error)}",
            cure="If an operator or a class is missing, import its package in model.py beside the"
            " artifact; else write it again under this version of torch.",
        ) from error
