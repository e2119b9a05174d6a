"""Weights of modules: building a module without random values, and loading a file into it.

Files are read without executing code. They are mapped: where a module loads a weight unchanged, the
weight stays in the mapped file (see `mapped_files`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar
from unittest import mock

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_py_backend.artifacts import discovery, file_types
from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.artifacts.file_types import FileType
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, WeightsError, a_type, counted, summarize
from torch_py_backend.loading import mapped_files

_Built = TypeVar("_Built")

# The end of the keys of what get_extra_state() returns: any picklable value.
_EXTRA_STATE = "_extra_state"
# So many of a module's keys are looked for with a prefix: a tied weight may not be in the file.
_COMPARED = 8
# The class or function that weights_only refuses, in the message of torch.load.
_REFUSED = re.compile(r"GLOBAL (\S+) was not an allowed global")


def load_into(config: ModelConfig, artifact: Artifact, module: nn.Module) -> None:
    """Load the weights into the module: all keys, no other keys, the same shapes.

    Args:
        config: the model's config.
        artifact: the model file and the file of weights.
        module: gets the weights.

    Raises:
        ArtifactError: there is no file of weights, or it cannot be read.
        WeightsError: its keys or shapes are not those of the module.
    """
    own = module.state_dict(keep_vars=True)
    if artifact.weights is None:
        if not own:
            return
        raise ArtifactError(
            config.name,
            f"{type(module).__name__} has {counted(len(own), 'weight')}, and there is no weights"
            f" file beside {artifact.path.name}",
            expected=f"{artifact.path.stem}.safetensors, .pt or .pth",
            cure='Save module.state_dict() there, or set the parameter WEIGHTS to "none".',
        )
    # The module loads its other entries itself, as quantized modules and set_extra_state() do.
    tensors = {
        key: value
        for key, value in own.items()
        if isinstance(value, Tensor) and not key.endswith(_EXTRA_STATE)
    }
    state = read(config, artifact.weights)
    loaded = own.keys() - tensors.keys()
    if others := {key: it for key, it in _no_tensors(state).items() if key not in loaded}:
        raise _not_a_state_dict(config, artifact.weights, state, others, own)
    file = artifact.weights.name
    missing = [key for key in own if key not in state]
    unexpected = [key for key in state if key not in own]
    shapes = [
        f"{key} {list(state[key].shape)} instead of {list(tensor.shape)}"
        for key, tensor in tensors.items()
        # A lazy module gets its shapes from the file.
        if key in state and not is_lazy(tensor) and state[key].shape != tensor.shape
    ]
    if not shapes:  # otherwise torch would load the first value for a weight without dimensions
        try:
            with contextlib.ExitStack() as stack:
                if not discovery.mapping_obstacle(config, artifact):
                    stack.enter_context(mapped_files.AliasOnCopy(state.values()))
                # The module compares the keys: it may translate old names and add missing values.
                # Its own load_state_dict() may return nothing.
                compared = module.load_state_dict(state, strict=False)
                missing, unexpected = compared or (missing, unexpected)
        except RuntimeError as error:
            # torch's first line says only that there are errors.
            reason = str(error).partition("\n\t")[2] or str(error)
            raise ArtifactError(
                config.name,
                f"the weights {file} do not fit {type(module).__name__}:"
                f" {summarize(RuntimeError(reason))}",
            ) from error
    # Tied weights may have one of their names in the file.
    present = {id(tensor) for key, tensor in tensors.items() if key in state}
    missing = [key for key in missing if id(tensors.get(key)) not in present]
    if missing or unexpected or shapes:
        prefix = _prefix(state, own)
        hint = f"Save them without '{prefix}' before their keys." if prefix else ""
        raise WeightsError(
            config.name, file, missing=missing, unexpected=unexpected, shapes=shapes, hint=hint
        )


# --- files -----------------------------------------------------------------------------------


def read(config: ModelConfig, path: Path) -> Mapping[str, Any]:
    """Return the entries of a state_dict in a file, or in the shards that an index names, by key.

    Raises:
        ArtifactError: they cannot be read.
    """
    if path.suffix == ".safetensors":
        return read_safetensors(config, path)
    if path.suffix == ".json":
        return _read_shards(config, path)
    try:
        content = file_types.file_type(path)
        if content is FileType.STATE_DICT:
            # Compressed entries cannot be mapped: their compressed bytes would be read as values.
            mmap = not file_types.mmap_obstacle(path)
            state = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except OSError as error:
        raise ArtifactError(
            config.name, f"the weights {path.name} cannot be read: {summarize(error)}"
        ) from error
    except Exception as error:  # a damaged pickle raises nearly anything
        refused = _REFUSED.search(str(error))
        raise ArtifactError(
            config.name,
            f"the weights {path.name} hold {refused[1]}, which weights_only refuses to load"
            if refused
            else f"the weights {path.name} cannot be read with weights_only: {summarize(error)}",
            expected="a state_dict of plain tensors",
            cure="Save module.state_dict() there, or convert it to safetensors.",
        ) from error
    if content is not FileType.STATE_DICT:
        raise ArtifactError(
            config.name,
            f"the weights {path.name} are {content.value}",
            expected="a state_dict that torch.save wrote, or safetensors",
            cure="Save module.state_dict() there.",
        )
    if _is_named(state):
        return state
    raise _not_a_state_dict(config, path, state, _no_tensors(state))


def _is_named(state: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(state, Mapping) and all(isinstance(key, str) for key in state)


def _no_tensors(state: object) -> dict[str, object]:
    """Return the entries whose values are no tensors."""
    entries = state.items() if isinstance(state, Mapping) else ()
    return {key: value for key, value in entries if not isinstance(value, Tensor)}


def _not_a_state_dict(
    config: ModelConfig,
    path: Path,
    state: object,
    others: Mapping[str, object],
    own: Collection[str] = (),
) -> ArtifactError:
    """Return the error that says what to save of a file.

    `others` are its entries that are no weights, `own` the keys of the module.
    """
    cure = "Save module.state_dict() without other entries."
    for key, value in others.items():
        if _is_named(value) and len(_no_tensors(value)) < len(value):
            prefix = _prefix(value, own)
            without = f", without '{prefix}' before its keys" if prefix else ""
            cure = f"Save its entry '{key}' alone{without}."
            break
    entry = next((f": '{key}' is {a_type(it)}" for key, it in others.items()), "")
    return ArtifactError(
        config.name,
        f"the weights {path.name} hold {a_type(state)} that is not a state_dict{entry}",
        expected="tensors by name",
        cure=cure,
    )


def _prefix(keys: Collection[str], own: Collection[str]) -> str:
    """Return what precedes a module's own keys in those of a file, such as "module."."""
    for name in [*own][:_COMPARED]:
        for key in keys:
            prefix = key.removesuffix(name)
            if prefix.endswith(".") and sum(prefix + name in keys for name in own) * 2 > len(own):
                return prefix
    return ""


def _read_shards(config: ModelConfig, index: Path) -> Mapping[str, Tensor]:
    """Return the weights of all shards that an index names."""
    try:
        weight_map = file_types.weight_map(index)
    except ValueError as error:
        raise ArtifactError(
            config.name,
            f"the weights {index.name} are not an index of safetensors: {error}",
            expected="a JSON object with a weight_map from keys to files",
        ) from error
    state: dict[str, Tensor] = {}
    for name in sorted({*weight_map.values()}):
        path = index.parent / name
        # If the index is a link, its shards may be links into the folder of its target.
        inside = discovery.is_inside(path, config.folder, index.resolve().parent)
        if not inside or not path.is_file():
            raise ArtifactError(
                config.name,
                f"the weights {index.name} name {name}",
                expected="a file beside the index",
            )
        state |= {
            key: tensor
            for key, tensor in read_safetensors(config, path).items()
            if weight_map.get(key, name) == name
        }
    return state


def read_safetensors(config: ModelConfig, path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name.

    Raises:
        ArtifactError: the file cannot be read.
    """
    try:
        return safetensors.torch.load_file(path)
    except OSError as error:
        raise ArtifactError(
            config.name, f"{path.name} cannot be read: {summarize(error)}"
        ) from error
    except safetensors.SafetensorError as error:
        raise ArtifactError(
            config.name,
            f"{path.name} is not valid safetensors: {summarize(error)}",
            cure="Write them again with safetensors.torch.save_file, or copy them again.",
        ) from error


# --- modules without random values -----------------------------------------------------------


def build_uninitialized(
    build: Callable[[], _Built], saved: Callable[[], Collection[str]]
) -> _Built:
    """Return what `build` returns, without random values of weights where that is safe.

    Args:
        build: the constructor.
        saved: returns the keys of the weights in the file that will fill the module.

    Drawing the values takes longer than reading them: seconds and memory for each gigabyte, in each
    instance. Memory of torch.empty costs neither until it is written. The meta device would avoid
    the values as well, but also those of the buffers that a constructor computes and no file holds.

    It is safe if the skipped values are only in the module's state_dict under keys of the file, and
    nothing was computed from them or drawn after them: a random projection that is drawn later and
    is in no state_dict would have other values, and a module may accept that a file lacks some of
    its weights. Otherwise, and after an exception, `build` is called again.
    """
    random_state = torch.random.get_rng_state()
    with contextlib.suppress(Exception):  # the second call raises it, too, or succeeds
        with (
            mock.patch.object(nn.init, _TRUNCATED, _truncated),
            _SkipRandom() as skipping,
            _NoticeReads(skipping),
        ):
            built = build()
        if skipping.is_safe(built, saved):
            return built
    torch.random.set_rng_state(random_state)
    return build()


# This function of nn.init reads the values that it has drawn; no other one does.
_TRUNCATED = "_no_grad_trunc_normal_"
_original: Callable[..., Tensor] = getattr(nn.init, _TRUNCATED)


def _truncated(tensor: Tensor, *bounds: float, generator: torch.Generator | None = None) -> Tensor:
    if generator is not None:
        return _original(tensor, *bounds, generator=generator)
    with torch.no_grad():
        return tensor.normal_()


# Operations that take the shape of their argument, and not its values.
_SHAPE_ONLY = {
    getattr(torch.ops.aten, name).default
    for name in ("empty_like", "zeros_like", "ones_like", "full_like")
}


class _SkipRandom(mapped_files.DispatchMode):
    """Skips in-place random operations, and in-place operations on their results."""

    def __init__(self) -> None:
        super().__init__()
        # Tensors without values, by the identity of their storages.
        self._skipped: dict[int, Tensor] = {}
        # Whether nothing was computed from them, and nothing was drawn after them.
        self._unused = True

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        keywords = kwargs or {}
        # A generator that the caller passes is not affected by what is skipped.
        random = (
            torch.Tag.nondeterministic_seeded in func.tags and keywords.get("generator") is None
        )
        target = args[0] if args and func._schema.is_mutable else None
        if isinstance(target, Tensor):
            if mapped_files.storage_id(target) in self._skipped:
                return target
            if random:
                self._skip(target)
                return target
        reads = bool(self._skipped) and any(
            isinstance(leaf, Tensor) and mapped_files.storage_id(leaf) in self._skipped
            for leaf in pytree.tree_leaves((args, keywords))
        )
        if reads and func is torch.ops.aten.clone.default:  # copy.deepcopy of a layer
            clone = torch.ops.aten.empty_like.default(*args, **keywords)
            self._skip(clone)
            return clone
        if (random and self._skipped) or (reads and not func.is_view and func not in _SHAPE_ONLY):
            self._unused = False
        return func(*args, **keywords)

    def notice_read(self, tensor: Tensor) -> None:
        """Take note that the values of a tensor are used."""
        self._unused &= mapped_files.storage_id(tensor) not in self._skipped

    def _skip(self, tensor: Tensor) -> None:
        # A separate tensor, so that its storage shows whether the module still uses it.
        self._skipped[mapped_files.storage_id(tensor)] = tensor.detach()

    def is_safe(self, built: object, saved: Callable[[], Collection[str]]) -> bool:
        """Return whether the skipped values are weights that the file has, and nowhere else."""
        if not self._skipped:
            return True
        if not self._unused or not isinstance(built, nn.Module):
            return False
        keys = saved()
        filled = {
            mapped_files.storage_id(tensor)
            for key, tensor in built.state_dict(keep_vars=True).items()
            if key in keys
        }
        return all(
            storage in filled or mapped_files.has_no_other_views(tensor)
            for storage, tensor in self._skipped.items()
        )


class _NoticeReads(TorchFunctionMode):
    """Reports reads that no operation makes, and dispatch modes therefore do not see."""

    def __init__(self, skipping: _SkipRandom) -> None:
        super().__init__()
        self._skipping = skipping

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__):
            self._skipping.notice_read(args[0])
        return func(*args, **(kwargs or {}))
