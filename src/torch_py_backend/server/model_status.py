"""What Triton says of its models: versions put together, reasons made fit to be told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch_py_backend.errors import brief
from torch_py_backend.server.tritonserver import ModelState

_TRITON_S = re.compile(r"^load failed for model '.*?': version \d+ is at UNAVAILABLE state: ")


@dataclass(frozen=True, slots=True)
class View:
    """What Triton says of all versions of a model.

    Attributes:
        ready: at least one serves.
        unloaded: all were taken out of service, or are being.
        reason: why one does not serve that was not unloaded; Triton's own words.
        versions: those that serve; where none does, all.
        serving: the versions that serve.
        withdrawn: the versions that were taken out of service, or are being.
    """

    ready: bool
    unloaded: bool
    reason: str
    versions: str
    serving: frozenset[str] = frozenset()
    withdrawn: frozenset[str] = frozenset()


def views(states: Sequence[ModelState]) -> dict[str, View]:
    """Triton's index, by model."""
    grouped: dict[str, list[ModelState]] = {}
    for one in states:
        grouped.setdefault(one.name, []).append(one)
    found = {}
    for name, versions in grouped.items():
        ready = [one.version for one in versions if one.ready]
        reasons = [one.reason for one in versions if one.reason and not one.unloaded]
        labels = ready or [one.version for one in versions if one.version]
        found[name] = View(
            ready=bool(ready),
            unloaded=all(one.unloaded for one in versions),
            reason=reasons[0] if reasons else "",
            versions=",".join(labels),
            serving=frozenset(ready),
            withdrawn=frozenset(one.version for one in versions if one.unloaded),
        )
    return found


def ready(states: Sequence[ModelState]) -> set[str]:
    """The models that serve."""
    return {one.name for one in states if one.ready}


def sentence(reason: str) -> str:
    """Triton's reason as one line that may leave the server: no trace, no folder, no dot."""
    said = _TRITON_S.sub("", reason.partition("\n\nAt:")[0]).strip()
    if not said:
        return "no reason is told"
    return (
        brief(Exception(said)).removeprefix("Exception: ").removeprefix("Internal: ").rstrip(".; ")
    )
