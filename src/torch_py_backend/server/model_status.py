"""The status of models in Triton's repository index: versions merged, reasons shortened."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch_py_backend.errors import summarize
from torch_py_backend.server.tritonserver import ModelState

_LOAD_FAILED = re.compile(r"^load failed for model '.*?': version \d+ is at UNAVAILABLE state: ")


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The status of all versions of a model.

    Attributes:
        ready: at least one version serves.
        unloaded: all versions were unloaded, or are being unloaded.
        reason: why a version does not serve that was not unloaded, in Triton's words.
        versions: the versions that serve; all versions if none serves.
        serving: the versions that serve.
        withdrawn: the versions that were unloaded, or are being unloaded.
    """

    ready: bool
    unloaded: bool
    reason: str
    versions: str
    serving: frozenset[str] = frozenset()
    withdrawn: frozenset[str] = frozenset()


def by_model(states: Sequence[ModelState]) -> dict[str, ModelStatus]:
    """Return the status of each model in Triton's repository index."""
    grouped: dict[str, list[ModelState]] = {}
    for state in states:
        grouped.setdefault(state.name, []).append(state)
    return {name: _merge(versions) for name, versions in grouped.items()}


def _merge(states: Sequence[ModelState]) -> ModelStatus:
    ready = [state.version for state in states if state.ready]
    reasons = [state.reason for state in states if state.reason and not state.unloaded]
    return ModelStatus(
        ready=bool(ready),
        unloaded=all(state.unloaded for state in states),
        reason=reasons[0] if reasons else "",
        versions=",".join(ready or [state.version for state in states if state.version]),
        serving=frozenset(ready),
        withdrawn=frozenset(state.version for state in states if state.unloaded),
    )


def ready_models(states: Sequence[ModelState]) -> set[str]:
    """Return the names of the models that serve."""
    return {state.name for state in states if state.ready}


def public_reason(reason: str) -> str:
    """Return Triton's reason as one line without stack trace, folders and final full stop."""
    text = _LOAD_FAILED.sub("", reason.partition("\n\nAt:")[0]).strip()
    if not text:
        return "no reason was given"
    return (
        summarize(Exception(text))
        .removeprefix("Exception: ")
        .removeprefix("Internal: ")
        .rstrip(".; ")
    )
