"""Weights of modules: built without random values, read without running code, and mapped.

Where a module loads a weight unchanged, the weight stays in the mapped file (see `mapped_files`).
"""

from __future__ import annotations

import contextlib
import inspect
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, a_type, counted, printable, summarize
from torch_py_backend.loading import discovery, mapped_files
from torch_py_backend.loading.discovery import Artifact

_Built = TypeVar("_Built")

# The class or function that weights_only refuses, in the message of torch.load.
_REFUSED = re.compile(r"GLOBAL (\S+) was not an allowed global")


def load_into(config: ModelConfig, artifact: Artifact, module: nn.Module) -> None:
    """Load the weights into the module: all keys, no other keys, the same shapes.

    Raises:
        ArtifactError: there is no file of weights, it cannot be read, or the module does not load
            its entries.
    """
    own = module.state_dict(keep_vars=True)
    if artifact.weights is None:
        if own and not config.options.weights:  # that is "none"
            raise ArtifactError(
                f"{type(module).__name__} has {counted(len(own), 'weight')}, and there is no"
                f" weights file beside {artifact.path.name}",
                expected=f"{artifact.path.stem}.safetensors, .pt or .pth",
                cure='Save module.state_dict() there, or set the parameter WEIGHTS to "none".',
            )
        return
    state = read(config, artifact.weights)
    # A file may have one of the names of tied weights.
    present = {id(value): state[key] for key, value in own.items() if key in state}
    for key, value in own.items():
        if key not in state and id(value) in present:
            state[key] = present[id(value)]
    copied = config.options.enable_weight_sharing is False
    try:
        with contextlib.nullcontext() if copied else mapped_files.AliasOnCopy(state.values()):
            module.load_state_dict(state)
    except Exception as error:  # the module may load the entries with code of its own
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:2000]
        raise ArtifactError(
            f"the weights in {artifact.weights.name} do not fit the module: {printable(reason)}",
            cure="Save module.state_dict() of the class that is served, not of a DataParallel or"
            " compiled module around it; or change MODEL_KWARGS, from which it is built.",
        ) from error


def read(config: ModelConfig, path: Path) -> dict[str, Any]:
    """Return the entries of a state_dict in a file, or in the shards of an index, by key."""
    try:
        state = _read(config, path)
        if isinstance(state, dict) and all(isinstance(key, str) for key in state):
            return state
        found = f"holds {a_type(state)} that is not a state_dict"
    except ArtifactError:  # of a shard
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        refused = _REFUSED.search(str(error))
        found = f"cannot be read: {summarize(error)}"
        if refused:
            found = f"holds {refused[1]}, which weights_only refuses to load"
    raise ArtifactError(
        f"{path.name} {found}",
        expected="safetensors, or a state_dict of plain tensors that torch.save wrote",
    )


def _read(config: ModelConfig, path: Path) -> object:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    if path.suffix != ".json":
        # Compressed entries would be read as values. Files of torch before 1.6 have none.
        mmap = {member.compress_type for member in discovery.members(path)} == {zipfile.ZIP_STORED}
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    state: dict[str, Any] = {}
    for name in discovery.shard_names(path):
        shard = path.parent / name
        # If the index is a link, its shards may be links into the folder of its target.
        inside = discovery.is_inside(shard, config.folder, path.resolve().parent)
        if not inside or not shard.is_file():
            expected = "a file beside the index"
            raise ArtifactError(f"{path.name} names {name}", expected=expected)
        state |= read(config, shard)
    return state


def build_uninitialized(
    build: Callable[[], _Built], saved: Callable[[], Mapping[str, object]]
) -> _Built:
    """Return what `build` returns, without the random values of weights where that is safe.

    Drawing them takes seconds for each gigabyte, so the functions of `torch.nn.init` that draw do
    nothing meanwhile. The module is built again, with its values, unless the entries of the file,
    which `saved` returns, fill all of its tensors: another one may have been computed from values
    that were not drawn. So it is after other random operations, which drew other values than they
    should.
    """
    random_state = torch.random.get_rng_state()
    # The second call raises an exception, too, or succeeds.
    with contextlib.ExitStack() as stack, contextlib.suppress(Exception):
        for name, function in inspect.getmembers(nn.init, inspect.isfunction):
            if name.endswith("_") and "generator" in inspect.signature(function).parameters:
                skip = mock.patch.object(nn.init, name, lambda tensor, *_, **__: tensor)
                stack.enter_context(skip)
        built = build()
        drew = not torch.equal(torch.random.get_rng_state(), random_state)
        if isinstance(built, nn.Module) and not drew and _fills(saved(), built):
            return built
    torch.random.set_rng_state(random_state)
    return build()


def _fills(saved: Mapping[str, object], module: nn.Module) -> bool:
    """Return whether a file has the values of all tensors of a module and of its attributes."""
    filled = {
        mapped_files.storage_id(tensor)
        for key, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor) and getattr(saved.get(key), "shape", None) == tensor.shape
    }
    leaves = pytree.tree_leaves([vars(part) for part in module.modules()])
    return all(
        mapped_files.storage_id(leaf) in filled for leaf in leaves if isinstance(leaf, Tensor)
    )
