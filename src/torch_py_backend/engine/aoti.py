"""OPTIMIZE "aoti": a module is compiled to an AOTInductor package before READY.

A child process exports the module, compiles the package into the model's compile cache, and
compares its outputs with the module's own. The package has no weights: it reads the tensors of the
module, which the instances share. Calls that a package does not take run eagerly.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import logging
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_py_backend import files
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine import compilation, sharing, warmup
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, LoadError, counted, join_names, summarize
from torch_py_backend.loading import aotinductor
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.pipeline.differences import disagreement
from torch_py_backend.processes import child_process, instance_status
from torch_py_backend.values import Tree

log = logging.getLogger(__name__)

_BUILD = "torch_py_backend.engine.load:write_package"
# Seconds for an export, a compilation and a comparison.
_LIMIT_S = 3600.0
_CURE = (
    "Remove aoti from OPTIMIZE to serve the module eagerly, or set"
    ' TORCH_COMPILE_OPTIONAL_PARAMETERS to "{}", which can compile a part of it.'
)
# Of the file with the constants that no weight of the module is.
_KEPT = ".safetensors"
_WITHOUT_WEIGHTS = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
    # It would convert the weights of convolutions in each call, as they are not constants.
    "layout_optimization": False,
    # A call with one row is compared with the module's; other sizes of 1 run eagerly.
    "aot_inductor.check_lowerbound": False,
}

# A call of the module: the rows of its batch, and the leaves and the tree of its arguments.
_Call: TypeAlias = "tuple[int, list[Any], pytree.TreeSpec]"


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

    `refusal` is why it did not take one, or empty; `close` removes temporary files.
    """

    def __init__(
        self,
        path: Path,
        loaded: Loaded,
        device: torch.device,
    ) -> None:
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP  # noqa: PLC0415  slow

        package, result, self.close = aotinductor.open_package(path, device)
        with safetensors.safe_open(path.with_suffix(_KEPT), "pt", str(device)) as kept:
            metadata = kept.metadata()
            tensors = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118  no dict
        if tensors:
            log.info("the compiled package has constants of its own: %s.", join_names(tensors))
        tensors |= _named(loaded)
        # The package reads the memory of these tensors, which must stay as long as itself.
        self._tensors = {name: tensors[name] for name in package.get_constant_fqns()}
        package.load_constants(self._tensors, False, False, True)  # noqa: FBT003
        self._package, self._module = package, loaded.module
        self._result = None if result.is_leaf() else result
        self._tree = pytree.treespec_loads(metadata["tree"])
        flat = pytree.tree_structure(((0,) * self._tree.num_leaves, {}))
        self._takes_leaves = self._tree == flat
        self._sizes: list[list[int]] = json.loads(metadata["sizes"])
        # torch.export's assumptions on sizes, which a package does not check. Code, as itself is.
        log.info("the compiled package takes sizes that fulfill: %s.", metadata["guards"])
        self._fits = eval(f"lambda L: {metadata['guards']}", dict(SYMPY_INTERP))  # noqa: S307
        self.refusal = ""

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        leaves: Sequence[Any] = args
        if not self._takes_leaves or kwargs or len(args) != self._tree.num_leaves:
            leaves, tree = pytree.tree_flatten((args, kwargs))
            if tree != self._tree:  # an optional input is missing
                return self._module(*args, **kwargs)
        if any(leaf is None for leaf in leaves):  # likewise
            return self._module(*args, **kwargs)
        is_small = any(leaves[leaf].shape[dim] < least for leaf, dim, least in self._sizes)
        if is_small or not self._fits({"leaves": leaves}):
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


def _named(loaded: Loaded) -> dict[str, Tensor]:
    """Return the tensors of a module under the names that they have in a package."""
    named = {} if loaded.owner is None else sharing.named(loaded.owner)
    return {f"owner.{name}": tensor.detach() for name, tensor in named.items()}


def packaged(
    config: ModelConfig,
    loaded: Loaded,
    device: torch.device,
) -> Loaded:
    """Return the model with a package, which is built if it is missing, in its module's place."""
    path = compilation.cache_folder(config) / "aoti" / f"{_key(config, loaded, device)}.pt2"
    module = None
    if path.exists():
        try:
            with zipfile.ZipFile(path) as archive:  # torch does not check that it is intact
                if damaged := archive.testzip():
                    raise zipfile.BadZipFile(damaged)
            module = Packaged(path, loaded, device)
        except Exception as error:  # a damaged file raises nearly anything
            log.warning("%s cannot be read, and is built again: %s", path.name, summarize(error))
    if module is None:
        log.info("AOTInductor compiles the model, which may take minutes.")
        path.parent.mkdir(exist_ok=True)
        arguments = {"arguments": dict(config.arguments), "path": str(path)}
        child_process.run(_BUILD, arguments, _LIMIT_S)
        module = Packaged(path, loaded, device)
    return dataclasses.replace(loaded, module=module, close=module.close)


def _key(config: ModelConfig, loaded: Loaded, device: torch.device) -> str:
    """Return a name for what a package depends on: code, sizes, torch, machine, threads.

    It is the same in a copy of the folder. A package may have constants made of the weights.
    """
    machine = aotinductor.this_machine(device)
    parts: list[object] = [torch.__version__, machine, torch.get_num_threads()]
    parts += [config.options, config.max_batch_size, *map(str, config.inputs)]
    # Of the package of a factory, such as transformers.
    package = (config.options.model_factory or "").partition(".")[0].partition(":")[0]
    parts.append(getattr(sys.modules.get(package), "__version__", ""))
    digest = hashlib.sha256(repr(parts).encode())
    read = {*config.version_folder.rglob("*"), config.folder / "config.json"}
    # All that its code may read. A model that writes files there is built again at each load.
    paths = [path for path in read if path.is_file() and path.suffix != ".pyc"]
    for path in sorted({*paths, *loaded.artifact.weight_files()}):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]


def write(engine: Engine, path: Path) -> None:
    """Export, compile and compare a model, and write its package; LoadError if it differs."""
    module = engine.loaded.module
    most = engine.config.max_batch_size
    calls: list[_Call] = []

    def capture(*args: Tree, **kwargs: Tree) -> Tree:
        calls.append((rows, *pytree.tree_flatten((args, kwargs))))
        return module(*args, **kwargs)

    engine.use(capture)
    samples = []
    # Not with one row first: torch.export takes a size of 1 for a constant.
    for rows in dict.fromkeys((2, 3, most, 1)) if most else (0,):
        for sample, _ in warmup.batches(engine, [rows]):
            try:
                expected = warmup.outputs(engine, copy.deepcopy(sample))
            except BackendError as error:
                raise LoadError(f"it cannot be run with a sample: {error}", cure=_CURE) from error
            samples.append((rows, sample, expected))
    if engine.failures.writes_buffers():
        raise LoadError("forward() writes to its buffers, which a package would not", cure=_CURE)
    scratch = instance_status.folder()
    with tempfile.TemporaryDirectory(dir=scratch) as folder, compilation.cached(engine.config):
        draft = Path(folder, path.name)
        _compile(draft, engine.loaded, calls)
        compiled = Packaged(draft, engine.loaded, engine.device)
        engine.use(compiled)
        for rows, sample, expected in samples:
            outputs = warmup.outputs(engine, sample)
            problem = "".join(map(disagreement, outputs, expected))
            if problem or compiled.refusal:
                problem = problem or f"torch.export has fixed a size: {compiled.refusal}"
                of = counted(rows, "row")
                raise LoadError(f"the compiled package is wrong for {of}: {problem}", cure=_CURE)
        for suffix in (_KEPT, path.suffix):  # the package last: it is complete then
            files.replace(path.with_suffix(suffix), draft.with_suffix(suffix).read_bytes())


def _are_tensors(leaves: Sequence[Any]) -> bool:
    return all(isinstance(leaf, Tensor) for leaf in leaves)


def _sizes(calls: Sequence[_Call]) -> list[tuple[int, int, int]]:
    """Return the leaf, the dimension and the least value of each size in which calls differ."""
    sizes = []
    _, leaves, tree = calls[0]
    # Not those without an optional input.
    alike = [(rows, of) for rows, of, other in calls if other == tree and _are_tensors(of)]
    for number, leaf in enumerate(leaves):
        for dim in range(leaf.ndim):
            seen = {(rows, of[number].shape[dim]) for rows, of in alike}
            if len({size for _, size in seen}) > 1:
                # A size that depends on the rows alone is compared where it is 1.
                of_rows = len({rows for rows, _ in seen}) == len(seen)
                sizes.append((number, dim, 1 if of_rows else 2))
    return sizes


def _compile(path: Path, loaded: Loaded, calls: Sequence[_Call]) -> None:
    """Export and compile a module; sizes in which its calls differ are dynamic."""
    _, leaves, tree = calls[0]
    if not _are_tensors(leaves):
        raise LoadError("the module takes values that are not tensors", cure=_CURE)
    sizes = _sizes(calls)
    dynamic: list[dict[int, Any]] = [{} for _ in leaves]
    for number, dim, _ in sizes:
        dynamic[number][dim] = torch.export.Dim.AUTO
    # torch.export takes no tensors of inference mode, and one tensor in two places for one input.
    leaves = [leaf.clone() for leaf in leaves]
    for weight in loaded.weights:
        # A linear layer of three dimensions then becomes one product of matrices, not a batch of
        # them: `should_fold` in ATen's LinearAlgebra.cpp. torch.export warns of such buffers.
        weight.requires_grad = isinstance(weight, nn.Parameter) and weight.is_floating_point()
    kind = torch.export.graph_signature.InputKind
    try:
        with torch.no_grad():
            program = torch.export.export(
                _Leaves(loaded, tree), tuple(leaves), dynamic_shapes={"leaves": tuple(dynamic)}
            )
            for spec in program.graph_signature.input_specs:
                # Inductor gives constants names of its own, and buffers those of the module.
                if spec.kind is kind.CONSTANT_TENSOR:
                    spec.kind, spec.persistent = kind.BUFFER, False
            aotinductor.compile_program(program, path, _WITHOUT_WEIGHTS)
    except Exception as error:  # of the module's own code, or the compiler's
        raise LoadError(f"AOTInductor cannot compile it: {summarize(error)}", cure=_CURE) from error
    own = _named(loaded)
    kept = {name: value for name, value in program.constants.items() if name not in own}
    metadata = {"tree": pytree.treespec_dumps(tree), "sizes": json.dumps(sizes)}
    guards = getattr(program, "_guards_code", ())  # not in older versions of torch
    metadata["guards"] = " and ".join(f"({guard})" for guard in guards) or "True"
    safetensors.torch.save_file(kept, path.with_suffix(_KEPT), metadata)
