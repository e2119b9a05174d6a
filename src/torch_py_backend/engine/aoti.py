"""OPTIMIZE "aoti": a module is compiled to an AOTInductor package before READY.

A child process exports the module, compiles the package into the model's compile cache, and
compares its outputs with the module's own. The package has no weights: it reads the tensors of the
module, which the instances share. Calls that a package does not take run eagerly.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_py_backend import files
from torch_py_backend.config import model_config, threads
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine import compilation, runtime, sharing, warmup
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, LoadError, counted, join_names, summarize
from torch_py_backend.loading import aotinductor, discovery, example_inputs, hooks, registry
from torch_py_backend.loading.loaded import Forward, Loaded
from torch_py_backend.pipeline.differences import difference, tolerance
from torch_py_backend.processes import child_process, instance_status
from torch_py_backend.signature import binding
from torch_py_backend.values import Tree, Value

log = logging.getLogger(__name__)

_BUILD = "torch_py_backend.engine.aoti:build"
# Seconds for an export, a compilation and a comparison.
_LIMIT_S = 3600.0
_CURE = (
    "Remove aoti from OPTIMIZE to serve the module eagerly, or set"
    ' TORCH_COMPILE_OPTIONAL_PARAMETERS to "{}", which can compile a part of it.'
)
# The suffix of the file with the constants that no weight of the module is.
_KEPT = ".safetensors"
_WITHOUT_WEIGHTS = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
    # It would convert the weights of convolutions in each call, as they are not constants.
    "layout_optimization": False,
    # A call with one row is compared with the module's; other sizes of 1 run eagerly.
    "aot_inductor.check_lowerbound": False,
}
# Rows of the calls whose sizes are compared: torch.export takes a size of 1 for a constant.
_ROWS = (2, 3)
# A size below this may need other code in a dimension of any size but the batch.
_LEAST_SIZE = 2


# The leaves of the arguments of a call, and their tree.
Call: TypeAlias = "tuple[list[Tensor], pytree.TreeSpec]"


class _Leaves(nn.Module):
    """A module that is called with the leaves of its arguments."""

    def __init__(self, loaded: Loaded, tree: pytree.TreeSpec) -> None:
        super().__init__()
        self.owner = loaded.owner
        # In a tuple: the tensors of the module have one name, below `owner`.
        self._called, self._tree = (loaded.module,), tree

    def forward(self, *leaves: Tensor) -> Tree:
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        return self._called[0](*args, **kwargs)


class Packaged:
    """A package in the place of a module, which takes the calls that the package does not take.

    Attributes:
        refusal: why the package did not take a call; empty: it took all of them.
        close: removes temporary files.
    """

    def __init__(
        self,
        path: Path,
        loaded: Loaded,
        device: torch.device | None,
    ) -> None:
        package, result, self.close = aotinductor.open_package(path, device)
        with safetensors.safe_open(path.with_suffix(_KEPT), "pt", str(device)) as kept:
            metadata = kept.metadata()
            tensors = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118  no dict
        if tensors:
            log.info("the compiled package has constants of its own: %s.", join_names(tensors))
        tensors |= _named(loaded.owner)
        # The package reads the memory of these tensors, which must stay as long as itself.
        self._tensors = {name: tensors[name] for name in package.get_constant_fqns()}
        package.load_constants(self._tensors, False, False, True)  # noqa: FBT003
        self._package, self._module = package, loaded.module
        self._result = None if result.is_leaf() else result
        self._tree = pytree.treespec_loads(metadata["tree"])
        _, flat = pytree.tree_flatten(((0,) * self._tree.num_leaves, {}))
        self._takes_leaves = self._tree == flat
        self._sizes: list[list[int]] = json.loads(metadata["sizes"])
        self.refusal = ""

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        leaves: Sequence[Any] = args
        if not self._takes_leaves or kwargs or len(args) != self._tree.num_leaves:
            leaves, tree = pytree.tree_flatten((args, kwargs))
            if tree != self._tree:  # an optional input is missing
                return self._module(*args, **kwargs)
        for leaf, dim in self._sizes:
            if leaves[leaf].shape[dim] < _LEAST_SIZE:
                return self._module(*args, **kwargs)
        try:
            outputs = self._package.run(list(leaves))
        except RuntimeError as error:
            if not aotinductor.REFUSED.search(str(error)):
                raise
            if not self.refusal:
                self.refusal = summarize(error)
                log.warning("the compiled package refuses a call, which runs eagerly: %s", error)
            return self._module(*args, **kwargs)
        return outputs[0] if self._result is None else pytree.tree_unflatten(outputs, self._result)


def _named(owner: nn.Module | None) -> dict[str, Tensor]:
    """Return the tensors of a module under the names that they have in a package."""
    named = {} if owner is None else sharing.named(owner)
    return {f"owner.{name}": tensor.detach() for name, tensor in named.items()}


def packaged(
    config: ModelConfig,
    loaded: Loaded,
    device: torch.device,
) -> Loaded:
    """Return the model with a package in the place of its module; build that if it is missing.

    Raises:
        LoadError: the module cannot be exported or compiled, or the package differs from it.
    """
    folder = compilation.cache_folder(config) / "aoti"
    path = folder / f"{_key(config, loaded, device)}.pt2"
    if not path.exists():
        log.info("AOTInductor compiles the model, which may take minutes.")
        folder.mkdir(exist_ok=True)
        arguments = {"arguments": dict(config.arguments), "path": str(path)}
        child_process.run(_BUILD, arguments, _LIMIT_S)
    module = Packaged(path, loaded, device)

    def close() -> None:
        loaded.close()
        module.close()

    return dataclasses.replace(loaded, module=module, close=close)


def _key(config: ModelConfig, loaded: Loaded, device: torch.device) -> str:
    """Return a name for what a package depends on: code, sizes, torch, machine, threads.

    It is the same in a copy of the folder. A package may have constants that the module computes
    from its weights.
    """
    machine = aotinductor.this_machine(device)
    parts: list[object] = [torch.__version__, machine, torch.get_num_threads()]
    parts += [config.options, config.max_batch_size, *map(str, config.inputs)]
    # Of the package of a factory, such as transformers.
    package = (config.options.model_factory or "").partition(".")[0].partition(":")[0]
    parts.append(getattr(sys.modules.get(package), "__version__", ""))
    digest = hashlib.sha256(repr(parts).encode())
    for path in sorted({*config.version_folder.rglob("*.py"), *loaded.artifact.weight_files()}):
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()[:16]


def build(arguments: Mapping[str, str], path: str) -> None:
    """Export, compile and compare a model, and write its package. To be run in a child process.

    `arguments` are Triton's arguments of `initialize`.
    """
    config = model_config.parse(arguments)
    names = tuple(name for name in config.options.optimize if name != "aoti")
    options = dataclasses.replace(config.options, optimize=names)
    config = dataclasses.replace(config, options=options)
    runtime.set_switches(options, threads.budget(config))
    device = runtime.placement(config)
    artifact = discovery.find(config)
    loaded = registry.load(artifact, config, device)
    loaded = dataclasses.replace(loaded, module=registry.optimize(config, loaded))
    config = binding.with_controls(config, loaded.signature)
    user_hooks = hooks.load(config, artifact)

    def engine(module: Forward) -> Engine:
        return Engine(config, dataclasses.replace(loaded, module=module), device, user_hooks)

    target, scratch = Path(path), instance_status.folder()
    with tempfile.TemporaryDirectory(dir=scratch) as folder, compilation.cached(config):
        draft = Path(folder, target.name)
        _write(draft, config, loaded, *_captured(engine, loaded.module))
        module = Packaged(draft, loaded, device)
        _compare(engine(loaded.module), engine(module))
        if module.refusal:
            raise LoadError(f"torch.export has fixed a size: {module.refusal}", cure=_CURE)
        for suffix in (_KEPT, target.suffix):  # the package last: it is complete then
            files.replace(target.with_suffix(suffix), draft.with_suffix(suffix).read_bytes())


def _captured(engine: Callable[[Forward], Engine], module: Forward) -> list[Call]:
    """Return two calls of a module that differ in all sizes that may differ."""
    calls: list[Call] = []

    def capture(*args: Tree, **kwargs: Tree) -> Tree:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise LoadError("the module takes values that are not tensors", cure=_CURE)
        with torch.inference_mode(mode=False):  # torch.export takes no tensors of that mode
            calls.append(([leaf.clone() for leaf in leaves], tree))
        return module(*args, **kwargs)

    capturing = engine(capture)
    captured = []
    for rows, shrunk in zip(_ROWS, (False, True), strict=True):
        calls.clear()
        _run(capturing, rows, shrunk=shrunk)
        captured.append(calls[0])
    if capturing.failures.writes_buffers():
        raise LoadError("forward() writes to its buffers, which a package would not", cure=_CURE)
    return captured


def _run(
    engine: Engine,
    rows: int,
    *,
    shrunk: bool,
) -> Sequence[dict[str, Value]]:
    """Return the outputs for the example, or for made-up values."""
    config, example = engine.config, warmup.find_example(engine)
    # Hooks may not take smaller examples, such as a part of the bytes of a file.
    shrunk = shrunk and not (example and engine.hooks)
    count = rows if config.max_batch_size else None
    item = example_inputs.item(config, count, shrunk=shrunk, example=example)
    results = []
    with runtime.mode(config.options):
        for outcome in engine.run(example_inputs.requests(config, item)):
            if isinstance(outcome, BackendError):
                raise outcome
            results.append(outcome)
    return results


def _write(
    path: Path,
    config: ModelConfig,
    loaded: Loaded,
    call: Call,
    other: Call,
) -> None:
    """Export and compile a module; sizes in which the two calls differ are dynamic.

    Raises:
        LoadError: the module cannot be exported or compiled.
    """
    (leaves, tree), (others, other_tree) = call, other
    if tree != other_tree:
        raise LoadError("the module gets other arguments for other sizes", cure=_CURE)
    dynamic: list[dict[int, Any]] = []
    sizes = []
    has_rows = config.max_batch_size and not config.concatenates
    for number, (leaf, of_other) in enumerate(zip(leaves, others, strict=True)):
        dims = [dim for dim, size in enumerate(leaf.shape) if size != of_other.shape[dim]]
        dynamic.append(dict.fromkeys(dims, torch.export.Dim.AUTO))
        sizes += [[number, dim] for dim in dims if dim or not has_rows]
    for weight in loaded.weights:
        # A linear layer of three dimensions then becomes one product of matrices, not a batch of
        # them: `should_fold` in ATen's LinearAlgebra.cpp.
        weight.requires_grad = weight.is_floating_point()
    module = _Leaves(loaded, tree)
    kind = torch.export.graph_signature.InputKind
    try:
        with torch.no_grad():
            program = torch.export.export(
                module, tuple(leaves), dynamic_shapes={"leaves": tuple(dynamic)}
            )
            for spec in program.graph_signature.input_specs:
                # Inductor gives constants names of its own, and buffers those of the module.
                if spec.kind is kind.CONSTANT_TENSOR:
                    spec.kind, spec.persistent = kind.BUFFER, False
            aotinductor.compile_program(program, path, _WITHOUT_WEIGHTS)
    except Exception as error:  # of the module's own code, or the compiler's
        raise LoadError(f"AOTInductor cannot compile it: {summarize(error)}", cure=_CURE) from error
    own = _named(loaded.owner)
    kept = {name: value for name, value in program.constants.items() if name not in own}
    metadata = {"tree": pytree.treespec_dumps(tree), "sizes": json.dumps(sizes)}
    safetensors.torch.save_file(kept, path.with_suffix(_KEPT), metadata)


def _compare(eager: Engine, compiled: Engine) -> None:
    """Raise LoadError if the outputs of two engines differ for some row count or size."""
    for rows in sorted({1, *_ROWS, eager.config.max_batch_size} - {0}):
        for shrunk in (False, True):
            results = (_run(engine, rows, shrunk=shrunk) for engine in (compiled, eager))
            for actual, expected in zip(*results, strict=True):
                for name, value in expected.items():
                    error, limit = difference(actual[name], value), tolerance(value)
                    if not error <= limit:
                        raise LoadError(
                            f"output '{name}' of the compiled package differs from the module's"
                            f" own by {error:.2g} for {counted(rows, 'row')}",
                            expected=f"at most {limit:g}",
                            cure=_CURE,
                        )
