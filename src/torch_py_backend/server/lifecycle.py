"""The lifecycle of a model: its phases, its record, and the events that are reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeAlias

import grpc

from torch_py_backend.server.client import ModelState

Kind: TypeAlias = Literal["READY", "FAILED", "DOWN", "GIVEN UP", "RELEASED", "CHANGED", "WARNING"]


class Event(NamedTuple):
    """What happened to a model, for the user."""

    kind: Kind
    model: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind:<7} {self.model}" + (f": {self.text}" if self.text else "")


class Phase(Enum):
    LOADING = "is being loaded"
    SERVING = "serves"
    DOWN = "is down"
    GIVEN_UP = "stays down"


@dataclass(slots=True)
class ModelRecord:
    """The record of one model. Times are seconds of a monotonic clock.

    Attributes:
        since: when it last started or stopped to serve.
        reason: why it does not serve.
        attempts: how often it was reloaded since it last served for a minute.
        due: when it is reloaded, in the phase DOWN.
        call: the load (in the phase LOADING) or unload in progress.
        called: when that load began.
        reload: the load in progress that replaces the model that serves, whose files changed.
        processes: the live processes when the model failed, or its last load began.
        failure: why an instance failed, in the load in progress or before.
        parts: the models that an ensemble consists of.
        versions: the versions that served last.
        warnings: the warnings of its last load, all of which were reported.
        own_config: the config after the supervisor's last load; empty: unknown.
        config: the config that it was loaded with through Triton's API; None: its own.
    """

    name: str
    phase: Phase
    since: float
    reason: str = ""
    attempts: int = 0
    due: float = 0.0
    call: grpc.Future | None = None
    reload: grpc.Future | None = None
    called: float = 0.0
    processes: set[int] = field(default_factory=set)
    failure: str = ""
    parts: frozenset[str] = frozenset()
    versions: frozenset[str] = frozenset()
    warnings: Sequence[str] = ()
    own_config: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None

    def is_unloaded(self, state: ModelState | None) -> bool:
        """Return whether it was unloaded: Triton still reports versions that failed before."""
        if state is None or state.unloaded:
            return True
        return bool(self.versions) and self.versions <= state.withdrawn
