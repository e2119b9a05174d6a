"""torch.compile of the model: all compilation is done before READY, and none afterwards."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.batching.counters import Counts
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import CompileError, OptionError, summarize

log = logging.getLogger(__name__)


def requested(config: ModelConfig) -> bool:
    """Return whether the config asks for a compiled model."""
    parameters = config.options.torch_compile_optional_parameters
    return parameters is not None and not parameters.get("disable", False)


def static_shapes(config: ModelConfig) -> bool:
    """Return whether the config asks for a graph for each shape."""
    parameters = config.options.torch_compile_optional_parameters or {}
    return requested(config) and parameters.get("dynamic") is False


def required(config: ModelConfig) -> bool:
    """Return whether loading fails if the model cannot be compiled; `fullgraph` implies that."""
    parameters = config.options.torch_compile_optional_parameters or {}
    needed = config.options.compile_required or parameters.get("fullgraph", False)
    return requested(config) and bool(needed)


def by_inductor(config: ModelConfig) -> bool:
    """Return whether the config asks for inductor, torch.compile's default backend."""
    parameters = config.options.torch_compile_optional_parameters or {}
    return requested(config) and parameters.get("backend", "inductor") == "inductor"


def graph_count() -> int:
    """Return how many graphs this process has compiled or loaded from a cache."""
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return count


def apply(
    config: ModelConfig, kind: ArtifactType, module: Callable[..., Any], counts: Counts
) -> Compiled | None:
    """Compile a module if the config asks for it; None: it is served without torch.compile.

    Args:
        config: the model's config.
        kind: the type of its artifact.
        module: the module.
        counts: counts the calls that run eagerly after the model is sealed.

    Raises:
        OptionError: torch.compile does not accept the parameters.
    """
    # The model of a TorchServe handler is compiled by its loader.
    if not requested(config) or kind is ArtifactType.TORCHSERVE:
        return None
    if kind in (ArtifactType.TORCHSCRIPT, ArtifactType.AOTI):
        log.warning(
            "model '%s': TORCH_COMPILE_OPTIONAL_PARAMETERS has no effect on %s.",
            config.name,
            kind.value,
        )
        return None
    parameters = config.options.torch_compile_optional_parameters or {}
    if static_shapes(config):
        # There is one graph for each row count, and torch compiles no more than its limits allow.
        dynamo, graphs = torch._dynamo.config, config.max_batch_size + 1
        dynamo.recompile_limit = max(dynamo.recompile_limit, graphs)
        dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, graphs)
    torch.compiler.set_stance("default")
    torch._inductor.config.freezing = "freeze" in config.options.optimize
    eager_calls = _EagerCalls(config.name, counts)
    try:
        compiled = torch.compile(_traced(module, eager_calls), **parameters)
    except Exception as error:  # torch.compile raises various errors for unknown values
        raise parameter_error(config, error) from error
    return Compiled(config, module, compiled, eager_calls)


def _traced(module: Callable[..., Any], eager_calls: _EagerCalls) -> Callable[..., Any]:
    """Return a function that calls the module, and records calls that run eagerly.

    `is_compiling` is true while torch.compile traces it, so a compiled graph records nothing.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            eager_calls.record(args, kwargs)
        return module(*args, **kwargs)

    return call


class _EagerCalls:
    """Counts the calls of a sealed model that run eagerly, and logs the first one's shapes."""

    def __init__(self, model: str, counts: Counts) -> None:
        self.sealed = False
        self._model = model
        self._counts = counts
        self._logged = False

    def record(self, args: Any, kwargs: Any) -> None:
        if not self.sealed:
            return
        self._counts.eager_calls += 1
        if not self._logged:
            self._logged = True
            leaves = pytree.tree_leaves((args, kwargs))
            log.warning(
                "model '%s': inputs of the shapes %s were not met in the warm-up; they, and all"
                " others that would need a compilation, run eagerly.",
                self._model,
                [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)],
            )


def parameter_error(config: ModelConfig, error: Exception) -> OptionError:
    """Return the error for parameters that torch.compile does not accept."""
    return OptionError(
        config.name,
        "TORCH_COMPILE_OPTIONAL_PARAMETERS",
        json.dumps(config.options.torch_compile_optional_parameters or {}),
        f"what torch.compile takes ({summarize(error)})",
    )


class Compiled:
    """A model that compiles a graph for new shapes until it is sealed."""

    def __init__(
        self,
        config: ModelConfig,
        module: Callable[..., Any],
        compiled: Callable[..., Any],
        eager_calls: _EagerCalls,
    ) -> None:
        self._eager_calls = eager_calls
        parameters = config.options.torch_compile_optional_parameters or {}
        self._model = config.name
        self._eager = module
        self._compiled = compiled
        self._marks_rows = config.max_batch_size > 1 and parameters.get("dynamic") is None
        self._required = required(config)
        self._failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled model, or the eager one if it cannot be compiled.

        Raises:
            CompileError: it cannot be compiled, and COMPILE_REQUIRED is set.
        """
        if self._failed:
            return self._eager(*args, **kwargs)
        if self._marks_rows:
            for leaf in pytree.tree_leaves((args, kwargs)):
                # A batch of one row has a graph of its own, also if its dimension is marked.
                if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] > 1:
                    torch._dynamo.maybe_mark_dynamic(leaf, 0)
        try:
            return self._compiled(*args, **kwargs)
        except Exception as error:  # an error of the compiler, or of the model
            result = self._eager(*args, **kwargs)  # raises an error of the model again
            # Dynamo wraps the errors of compiler backends.
            reason = summarize(getattr(error, "inner_exception", error))
            if self._required:
                raise CompileError(self._model, reason) from error
            log.warning("model '%s' cannot be compiled and runs eagerly: %s.", self._model, reason)
            self._failed = True
            return result

    def seal(self) -> Callable[..., Any]:
        """Compile no more graphs, and return the model: calls without a graph run eagerly.

        A model with graph breaks continues eagerly where a graph is missing. "fail_on_recompile"
        would require to run the model again from its start, which would change inputs and buffers
        twice, and would fail compilations in hooks.
        """
        if self._failed:
            return self._eager
        torch.compiler.set_stance("eager_on_recompile")
        self._eager_calls.sealed = True
        return self._compiled
