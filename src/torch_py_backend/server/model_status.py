"""The status of the models of a server, from Triton's repository index."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_py_backend.errors import summarize

# What Triton puts before the reason of a failed load: the model, the version, the code.
_NESTING = re.compile(
    r"^(?:load failed for model '.*?': |version \d+ is at UNAVAILABLE state: "
    r"|(?:Unknown|Internal|Not found|Invalid argument|Unavailable|Unsupported|Already exists): "
    r"|TritonModelException: )+"
)
_NO_BACKEND = re.compile(
    r"(unable to find backend library for backend '(.*torch.*)'), try specifying runtime on the"
    r" model configuration\.?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class ModelState:
    """The state of one version of a model in Triton's repository index.

    Attributes:
        version: the version; empty if Triton does not report one.
        reason: why it does not serve.
        unloaded: whether it was unloaded, or is being unloaded.
    """

    name: str
    version: str
    ready: bool
    reason: str
    unloaded: bool = False


def parse_state(entry: Mapping[str, str]) -> ModelState:
    """Return the state of a model from an entry of Triton's repository index."""
    status, reason = entry.get("state"), entry.get("reason", "")
    unloaded = status == "UNLOADING" or reason == "unloaded"
    return ModelState(
        entry["name"], entry.get("version", ""), status == "READY", reason, unloaded=unloaded
    )


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The status of all versions of a model.

    Attributes:
        unloaded: whether all versions were unloaded, or are being unloaded.
        reason: why a version does not serve that was not unloaded, in Triton's words.
        versions: the versions that serve; all versions if none serves.
        serving: the versions that serve.
        withdrawn: the versions that were unloaded, or are being unloaded.
    """

    unloaded: bool
    reason: str
    versions: str
    serving: frozenset[str]
    withdrawn: frozenset[str]

    @property
    def ready(self) -> bool:
        """Whether at least one version serves."""
        return bool(self.serving)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The readiness of all models, for other threads.

    Attributes:
        models: the models that should serve, each with the reason why it does not; empty: it does.
        problem: a problem of the whole server.
        at: when it was taken, in the clock's seconds.
        warnings: the warnings of the last load of each model that serves, if there were any.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    problem: str = "the server is being started"
    at: float = 0.0
    warnings: Mapping[str, Sequence[str]] = field(default_factory=dict)


def by_model(states: Sequence[ModelState]) -> dict[str, ModelStatus]:
    """Return the status of each model in Triton's repository index."""
    grouped: dict[str, list[ModelState]] = {}
    for state in states:
        grouped.setdefault(state.name, []).append(state)
    statuses = {}
    for name, versions in grouped.items():
        serving = [state.version for state in versions if state.ready]
        reasons = (state.reason for state in versions if state.reason and not state.unloaded)
        statuses[name] = ModelStatus(
            unloaded=all(state.unloaded for state in versions),
            reason=next(reasons, ""),
            versions=",".join(serving or [state.version for state in versions if state.version]),
            serving=frozenset(serving),
            withdrawn=frozenset(state.version for state in versions if state.unloaded),
        )
    return statuses


def cause(model: str, reason: str) -> str:
    """Return why a model does not serve, or a warning of it, for a line that has its name."""
    return _innermost(reason).replace(f"model '{model}': ", "")


def is_same_config(config: str, loaded: str) -> bool:
    """Return whether a model's config in JSON is that of its last load, or not known."""
    return not config or bool(loaded and json.loads(config) == json.loads(loaded))


def public_reason(reason: str) -> str:
    """Return Triton's reason as one line without stack trace, folders and final full stop."""
    text = _innermost(reason)
    if not text:
        return "no reason was given"
    return summarize(Exception(text)).removeprefix("Exception: ").rstrip(".; ")


def _innermost(reason: str) -> str:
    """Return Triton's reason without its nesting and without the stack trace that it appends."""
    text = _NESTING.sub("", reason.partition("\n\nAt:")[0]).strip("; \n")
    return _NO_BACKEND.sub(r"\1. Did you mean pytorch_py?", text)
