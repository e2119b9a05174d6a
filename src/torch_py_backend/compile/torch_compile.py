"""torch.compile, applied to the model and nothing else: everything before READY, nothing after."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_py_backend.artifacts.discovery import Kind
from torch_py_backend.batching.counters import Counts
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import CompileError, OptionError, brief

log = logging.getLogger(__name__)


def requested(config: ModelConfig) -> bool:
    """Whether the config asks for a compiled model."""
    parameters = config.options.torch_compile_optional_parameters
    return parameters is not None and not parameters.get("disable", False)


def static(config: ModelConfig) -> bool:
    """Whether the config asks for a graph for each shape."""
    parameters = config.options.torch_compile_optional_parameters or {}
    return requested(config) and parameters.get("dynamic") is False


def required(config: ModelConfig) -> bool:
    """Whether a model that cannot be compiled is not served: one graph was asked for, not none."""
    parameters = config.options.torch_compile_optional_parameters or {}
    wished = config.options.compile_required or parameters.get("fullgraph", False)
    return requested(config) and bool(wished)


def by_inductor(config: ModelConfig) -> bool:
    """Whether the config asks for what torch.compile does unless it is told otherwise."""
    parameters = config.options.torch_compile_optional_parameters or {}
    return requested(config) and parameters.get("backend", "inductor") == "inductor"


def graphs() -> int:
    """How many graphs this process has compiled, or found in a cache."""
    counted: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return counted


def apply(
    config: ModelConfig, kind: Kind, module: Callable[..., Any], counts: Counts
) -> Compiled | None:
    """The module, compiled where the config asks for it; None: it is served as it is.

    Args:
        config: the model's config.
        kind: what the module was loaded from.
        module: the module.
        counts: where calls are counted that run eagerly, once the model is sealed.

    Raises:
        OptionError: torch.compile does not take the parameters.
    """
    # What a TorchServe handler calls its model is compiled where that is loaded.
    if not requested(config) or kind is Kind.TORCHSERVE:
        return None
    if kind in (Kind.TORCHSCRIPT, Kind.AOTI):
        log.warning(
            "model '%s': TORCH_COMPILE_OPTIONAL_PARAMETERS has no effect on %s.",
            config.name,
            kind.value,
        )
        return None
    parameters = config.options.torch_compile_optional_parameters or {}
    if static(config):
        # One graph a row count: torch's own limits would leave the others uncompiled.
        dynamo, graphs = torch._dynamo.config, config.max_batch_size + 1
        dynamo.recompile_limit = max(dynamo.recompile_limit, graphs)
        dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, graphs)
    torch.compiler.set_stance("default")
    torch._inductor.config.freezing = "freeze" in config.options.optimize
    unmet = _Unmet(config.name, counts)
    try:
        compiled = torch.compile(_marked(module, unmet), **parameters)
    except Exception as error:  # whatever torch.compile makes of a value that it does not know
        raise refusal(config, error) from error
    return Compiled(config, module, compiled, unmet)


def _marked(module: Callable[..., Any], unmet: _Unmet) -> Callable[..., Any]:
    """Return a function that calls the module, and reports a call for which no graph exists.

    While torch.compile traces it, `is_compiling` is true: the compiled function has no such branch.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            unmet(args, kwargs)
        return module(*args, **kwargs)

    return call


class _Unmet:
    """Counts the calls of a sealed model that run eagerly, and logs the first one's shapes."""

    def __init__(self, model: str, counts: Counts) -> None:
        self.sealed = False
        self._model = model
        self._counts = counts
        self._logged = False

    def __call__(self, args: Any, kwargs: Any) -> None:
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


def refusal(config: ModelConfig, error: Exception) -> OptionError:
    """torch.compile does not take the parameters, and says why."""
    return OptionError(
        config.name,
        "TORCH_COMPILE_OPTIONAL_PARAMETERS",
        json.dumps(config.options.torch_compile_optional_parameters or {}),
        f"what torch.compile takes ({brief(error)})",
    )


class Compiled:
    """A model that is compiled as it meets new shapes, until it is sealed."""

    def __init__(
        self,
        config: ModelConfig,
        module: Callable[..., Any],
        compiled: Callable[..., Any],
        unmet: _Unmet,
    ) -> None:
        self._unmet = unmet
        parameters = config.options.torch_compile_optional_parameters or {}
        self._model = config.name
        self._eager = module
        self._compiled = compiled
        self._marks_rows = config.max_batch_size > 1 and parameters.get("dynamic") is None
        self._required = required(config)
        self._failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, compiled where that can be done.

        Raises:
            CompileError: it cannot, and COMPILE_REQUIRED is set.
        """
        if self._failed:
            return self._eager(*args, **kwargs)
        if self._marks_rows:
            for leaf in pytree.tree_leaves((args, kwargs)):
                # One row is a graph of its own, whatever is marked.
                if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] > 1:
                    torch._dynamo.maybe_mark_dynamic(leaf, 0)
        try:
            return self._compiled(*args, **kwargs)
        except Exception as error:  # of the compiler, or of the model itself
            result = self._eager(*args, **kwargs)  # the model's own is raised here
            # What a compiler raised, dynamo wraps in an error of its own.
            reason = brief(getattr(error, "inner_exception", error))
            if self._required:
                raise CompileError(self._model, reason) from error
            log.warning("model '%s' cannot be compiled and runs eagerly: %s.", self._model, reason)
            self._failed = True
            return result

    def seal(self) -> Callable[..., Any]:
        """The model as requests call it: what would need a compilation runs eagerly.

        A model with graph breaks goes on eagerly where a graph is missing, after the graphs that it
        has: it is never run again from its start, which would change inputs and buffers twice.
        "fail_on_recompile" would demand that, and would fail what hooks compile themselves.
        """
        if self._failed:
            return self._eager
        torch.compiler.set_stance("eager_on_recompile")
        self._unmet.sealed = True
        return self._compiled
