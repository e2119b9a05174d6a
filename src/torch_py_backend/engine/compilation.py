"""torch.compile of the model: all compilation is done before READY, and none afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError, LoadError, summarize
from torch_py_backend.pipeline.run import Counts
from torch_py_backend.processes import private_files
from torch_py_backend.values import Call, Tree

log = logging.getLogger(__name__)


def captures(config: ModelConfig) -> bool:
    """Return whether torch.compile records a CUDA graph for each shape."""
    if config.kind == "CPU":
        return False
    arguments = config.options.compilation or {}
    return (
        arguments.get("backend") == "cudagraphs"
        or arguments.get("mode") in ("reduce-overhead", "max-autotune")
        or bool((arguments.get("options") or {}).get("triton.cudagraphs"))
    )


class Compiled:
    """A model that compiles a graph for new shapes until it is sealed."""

    def __init__(
        self,
        config: ModelConfig,
        module: Callable[..., object],
    ) -> None:
        parameters = config.options.compilation or {}
        if config.options.static_shapes:
            # There is one graph for each row count; torch compiles no more than its limits allow.
            dynamo, graphs = torch._dynamo.config, config.max_batch_size + 1
            dynamo.recompile_limit = max(dynamo.recompile_limit, graphs)
            dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, graphs)
        torch.compiler.set_stance("default")
        self._counts: Counts | None = None
        self._eager = module
        self._marks_rows = config.max_batch_size > 1 and parameters.get("dynamic") is None
        try:
            self._compiled: Callable[..., object] = torch.compile(self._traced, **parameters)
        except Exception as error:  # torch.compile raises various errors for unknown values
            reason = f"torch.compile refuses TORCH_COMPILE_OPTIONAL_PARAMETERS: {summarize(error)}"
            raise ConfigError(reason) from error
        self._call: Call = self._begin_step if captures(config) else self._compiled

    def _traced(self, *args: object, **kwargs: object) -> object:
        # False where torch.compile traces this function: a compiled graph records nothing.
        if not torch.compiler.is_compiling() and self._counts is not None:
            self._counts.eager_calls += 1
            if self._counts.eager_calls == 1:
                leaves = pytree.tree_leaves((args, kwargs))
                log.warning(
                    "inputs of the shapes %s were not met in the warm-up; they, and all"
                    " others that would need a compilation, run eagerly.",
                    [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)],
                )
        return self._eager(*args, **kwargs)

    def __call__(self, *args: object, **kwargs: object) -> Tree:
        """Call the compiled model; LoadError if it cannot be compiled."""
        if self._marks_rows:
            for leaf in pytree.tree_leaves((args, kwargs)):
                # A batch of one row has a graph of its own, also if its dimension is marked.
                if isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] > 1:
                    torch._dynamo.maybe_mark_dynamic(leaf, 0)
        try:
            return self._call(*args, **kwargs)
        except Exception as error:  # an error of the compiler, or of the model
            self._eager(*args, **kwargs)  # raises an error of the model again
            # Dynamo wraps the errors of compiler backends.
            reason = summarize(getattr(error, "inner_exception", error))
            raise LoadError(
                f"torch.compile failed: {reason}",
                cure="Install the compiler that it names, such as g++, or set"
                ' TORCH_COMPILE_OPTIONAL_PARAMETERS to {"disable": true} to serve it eagerly.',
            ) from error

    def seal(self, counts: Counts) -> Call:
        """Compile no more graphs, and return the model: calls without one are eager, and counted.

        "fail_on_recompile" would run a model with graph breaks again from its start.
        """
        torch.compiler.set_stance("eager_on_recompile")
        self._counts = counts
        counters = torch._dynamo.utils.counters
        counts.compiled_graphs = counters["stats"]["unique_graphs"]
        cache = counters["inductor"]
        if cache["fxgraph_cache_miss"] + cache["fxgraph_cache_bypass"]:
            counts.compile_cache["miss"] = 1
        elif cache["fxgraph_cache_hit"]:
            counts.compile_cache["hit"] = 1
        return self._call

    def _begin_step(self, *args: object, **kwargs: object) -> Tree:
        """Call the compiled model; CUDA graphs may write over the outputs of the last call."""
        torch.compiler.cudagraph_mark_step_begin()
        return self._compiled(*args, **kwargs)


@contextlib.contextmanager
def cached(config: ModelConfig) -> Iterator[None]:
    """Set inductor's cache to the model's folder for the code within, which compiles.

    Later starts load from there what the first one has compiled. While it is empty, others wait.
    """
    from torch._inductor import config as inductor  # noqa: PLC0415  slow to import

    # Inductor keeps them in a folder in /tmp whose name another user can predict, and every start
    # on a new machine would compile them. torch 2.6 has no such option.
    with contextlib.suppress(AttributeError):
        inductor.cpp_cache_precompile_headers = False
    with contextlib.ExitStack() as stack:
        stack.enter_context(private_files.turn(config.name))
        folder = cache_folder(config)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        if (folder / "fxgraph").exists():  # inductor creates it for its first graph
            stack.close()
        yield


def cache_folder(config: ModelConfig) -> Path:
    """Return the folder for compiled code: the configured one, or one of the user's cache.

    Its code is run, so no other user may write to it. The second one starts as a copy of the first.
    """
    option = Path(config.options.compile_cache_dir or "compile_cache")
    configured = (config.folder / option.expanduser()).resolve()
    home = Path(os.environ.get("HOME") or "/", ".cache", "torch-py-backend")
    name = Path("compile_cache", config.name)
    for known in (configured, home / name, None):
        folder = known or private_files.shared_folder() / name
        try:
            private_files.create(folder)
            obstacle = private_files.tree_risk(folder)
            if not os.access(folder, os.W_OK, effective_ids=True):
                obstacle = "this process may not write to it"
        except OSError as error:
            obstacle = summarize(error)
        if not obstacle:
            break
        log.warning("compiled code cannot be kept in %s: %s.", folder, obstacle)
    with contextlib.suppress(OSError):  # the configured folder is missing or unreadable
        if not any(folder.iterdir()) and not private_files.tree_risk(configured):
            shutil.copytree(configured, folder, dirs_exist_ok=True)
    return folder
