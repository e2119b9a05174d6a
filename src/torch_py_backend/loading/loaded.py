"""A loaded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.signature.arguments import Signature
from torch_py_backend.values import ANY_ROWS, Item, Rows

# A user's forward(), or what is called in its place: it takes and returns anything.
Forward: TypeAlias = "Callable[..., Any]"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model.

    Attributes:
        module, signature: the callable for inputs, and its arguments.
        owner: the module with its parameters and buffers; None: it has none, or they are hidden.
        rows: how many rows one call accepts.
        traced: the inputs and the outputs of an exported program by name, as fake tensors, whose
            sizes are no int if they are not fixed; None: they are not known.
        step: advances several streams at once; `module` begins one then.
        close: removes temporary files. May be called several times.
    """

    artifact: Artifact
    module: Forward
    signature: Signature
    owner: nn.Module | None = None
    rows: Rows = ANY_ROWS
    traced: tuple[Item, Item] | None = None
    step: Callable[[list[Any]], Any] | None = None
    close: Callable[[], object] = lambda: None

    @property
    def kind(self) -> ArtifactType:
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
