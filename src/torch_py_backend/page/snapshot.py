"""What the supervisor of a server publishes for its HTTP endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The readiness of all models at one moment.

    Attributes:
        models: the models that should serve, each with the reason why it does not; empty: it does.
        problem: a problem of the whole server.
        at: when it was taken, in seconds of a monotonic clock; 0: before the first step.
        warnings: the warnings of the last load of each model that serves, if there were any.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    problem: str = "the server is being started"
    at: float = 0.0
    warnings: Mapping[str, Sequence[str]] = field(default_factory=dict)
