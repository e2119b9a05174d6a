"""torch.compile, applied to the model and nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import torch

from torch_py_backend.artifacts import Kind
from torch_py_backend.config import ModelConfig
from torch_py_backend.errors import OptionError, brief

log = logging.getLogger(__name__)


def requested(config: ModelConfig) -> bool:
    """Whether the config asks for a compiled model."""
    parameters = config.options.torch_compile_optional_parameters
    return parameters is not None and not parameters.get("disable", False)


def apply(config: ModelConfig, kind: Kind, module: Callable[..., Any]) -> Callable[..., Any]:
    """The module, compiled where the config asks for it."""
    if not requested(config):
        return module
    if kind in (Kind.TORCHSCRIPT, Kind.AOTI):
        log.warning(
            "model '%s': TORCH_COMPILE_OPTIONAL_PARAMETERS has no effect on %s.",
            config.name,
            kind.value,
        )
        return module
    parameters = config.options.torch_compile_optional_parameters or {}
    if parameters.get("dynamic") is False:
        # One graph a row count: torch's own limits would leave the others uncompiled.
        dynamo, graphs = torch._dynamo.config, config.max_batch_size + 1
        dynamo.recompile_limit = max(dynamo.recompile_limit, graphs)
        dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, graphs)
    try:
        compiled: Callable[..., Any] = torch.compile(module, **parameters)
    except Exception as error:  # whatever torch.compile makes of a value that it does not know
        raise OptionError(
            config.name,
            "TORCH_COMPILE_OPTIONAL_PARAMETERS",
            json.dumps(parameters),
            f"what torch.compile takes ({brief(error)})",
        ) from error
    return compiled
