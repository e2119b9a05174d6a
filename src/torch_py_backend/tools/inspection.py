"""Load a model without a server and describe its signature, options and warnings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch_py_backend.artifacts import discovery
from torch_py_backend.batching import runtime
from torch_py_backend.config import model_config, threads, tuned_settings
from torch_py_backend.config.model_config import Origin, TensorSpec
from torch_py_backend.config.options import TABLE
from torch_py_backend.signature import binding
from torch_py_backend.startup import builder, warmup


class _Collector(logging.Handler):
    """A log handler that collects warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())


def inspect(arguments: Mapping[str, str]) -> dict[str, Any]:
    """Load and warm up a model; to be run in a child process, because it runs the model's code.

    Args:
        arguments: Triton's arguments of `initialize`.

    Returns:
        Artifact, weights, signature, the rule that binds inputs to arguments, inputs, outputs,
        max_batch_size, options in force and warnings, as JSON.

    Raises:
        LoadError: the model cannot be served.
    """
    collector = _Collector()
    logger = logging.getLogger("torch_py_backend")
    logger.addHandler(collector)
    logger.propagate = False
    settings = tuned_settings.apply(model_config.parse(arguments))
    share = threads.budget(settings)
    engine = builder.build(settings, share)
    if settings.options.warmup is not False:
        with runtime.mode(engine.config.options):
            warmup.run(engine)
    engine.leave()
    sent = [spec.name for spec in engine.config.inputs if spec.origin is Origin.CLIENT]
    # Inputs of hooks are bound to the hooks' own methods.
    rule = "" if engine.hooks else binding.rule(sent, engine.loaded.signature).value
    artifact = discovery.find(settings)
    if artifact.fallback is not None and engine.kind is not artifact.kind:
        artifact = artifact.fallback  # the package is for another machine
    return {
        "artifact": f"{artifact.path.name}: {artifact.kind.value}",
        "weights": str(engine.sharing),
        "signature": engine.signature,
        "hooks": str(engine.hooks or ""),
        "binding": rule,
        "inputs": [
            *(f"{_described(spec)} → {engine.places[spec.name]}" for spec in engine.config.inputs),
            *(
                f"{state.input} (state) → {engine.places[state.input]}"
                for state in settings.carried
            ),
            *(f"{spec} → {engine.places[spec.name]}" for spec in settings.batch_inputs),
        ],
        "outputs": [
            *map(_described, settings.outputs),
            *(f"{state.output} (state)" for state in settings.carried),
        ],
        "max_batch_size": settings.max_batch_size,
        "threads": {"intra_op": share.intra_op, "inter_op": share.inter_op},
        "options": {
            row.key: getattr(settings.options, row.field)
            for row in TABLE
            if getattr(settings.options, row.field) != row.default
        },
        "warnings": collector.sentences,
    }


def _described(spec: TensorSpec) -> str:
    return str(spec) if spec.origin is Origin.CLIENT else f"{spec} ({spec.origin.value})"
