"""torch.compile, applied to the model and nothing else: everything before READY, nothing after."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_py_backend.artifacts import Kind
from torch_py_backend.config import ModelConfig
from torch_py_backend.counts import Counts
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
    try:
        compiled: Callable[..., Any] = torch.compile(module, **parameters)
    except Exception as error:  # whatever torch.compile makes of a value that it does not know
        raise refusal(config, error) from error
    return Compiled(config, module, compiled, counts)


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
        counts: Counts,
    ) -> None:
        self._counts = counts
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

    def stop(self) -> None:
        """Run the model eagerly from now on."""
        self._failed = True

    def usable(self) -> bool:
        """Whether calls run compiled."""
        return not self._failed

    def seal(self) -> Callable[..., Any]:
        """The model as requests call it: a shape that would need a compilation runs eagerly."""
        if self._failed:
            return self._eager
        torch.compiler.set_stance("fail_on_recompile")
        return _Sealed(self._model, self._eager, self._compiled, self._counts)


class _Sealed:
    def __init__(
        self,
        model: str,
        eager: Callable[..., Any],
        compiled: Callable[..., Any],
        counts: Counts,
    ) -> None:
        self._counts = counts
        self._model = model
        self._eager = eager
        self._compiled = compiled
        self._told = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._compiled(*args, **kwargs)
        except RuntimeError as error:
            if "fail_on_recompile" not in str(error):
                raise
            if not self._told:
                self._told = True
                shapes = [
                    list(leaf.shape)
                    for leaf in pytree.tree_leaves((args, kwargs))
                    if isinstance(leaf, Tensor)
                ]
                log.warning(
                    "model '%s': inputs of the shapes %s were not met in the warm-up; they, and all"
                    " others that would need a compilation, run eagerly.",
                    self._model,
                    shapes,
                )
        self._counts.eager_calls += 1
        with torch.compiler.set_stance("force_eager"):
            return self._eager(*args, **kwargs)
