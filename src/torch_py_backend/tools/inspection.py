"""A model, loaded and warmed up without a server: what it takes, and what is wrong with it."""

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
    """Warnings, as a list of sentences."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())


def inspect(arguments: Mapping[str, str]) -> dict[str, Any]:
    """Load and warm up a model; run in a child process, for the model's own code runs here.

    Args:
        arguments: what Triton passes to `initialize`.

    Returns:
        artifact, weights, signature, what binds inputs to arguments, inputs, outputs,
        max_batch_size, options in force, warnings: as JSON.

    Raises:
        LoadError: it cannot be served; the message says why.
    """
    collector = _Collector()
    logger = logging.getLogger("torch_py_backend")
    logger.addHandler(collector)
    logger.propagate = False
    settings = tuned_settings.apply(model_config.parse(arguments))
    share = threads.budget(settings)
    made = builder.build(settings, share)
    if settings.options.warmup is not False:
        with runtime.mode(made.config.options):
            warmup.run(made)
    made.leave()
    brought = [spec.name for spec in made.config.inputs if spec.origin is Origin.CLIENT]
    # The inputs of hooks are those of their own methods.
    rule = "" if made.hooks else binding.rule(brought, made.loaded.signature).value
    artifact = discovery.find(settings)
    if artifact.fallback is not None and made.kind is not artifact.kind:
        artifact = artifact.fallback  # the package was built for another machine
    return {
        "artifact": f"{artifact.path.name}: {artifact.kind.value}",
        "weights": str(made.sharing),
        "signature": made.signature,
        "hooks": str(made.hooks or ""),
        "binding": rule,
        "inputs": [
            *(f"{_told(spec)} → {made.places[spec.name]}" for spec in made.config.inputs),
            *(f"{one.input} (state) → {made.places[one.input]}" for one in settings.carried),
            *(f"{one} → {made.places[one.name]}" for one in settings.batch_inputs),
        ],
        "outputs": [
            *map(_told, settings.outputs),
            *(f"{one.output} (state)" for one in settings.carried),
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


def _told(spec: TensorSpec) -> str:
    return str(spec) if spec.origin is Origin.CLIENT else f"{spec} ({spec.origin.value})"
