"""Weights of modules: built without random values, read without running code, and mapped.

All processes of a machine share the pages of a mapped file. What a model writes into its weights
stays in its process and does not reach the file: MAP_PRIVATE in mmap(2).
"""

from __future__ import annotations

import bisect
import contextlib
import inspect
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar
from unittest import mock

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, a_type, counted, printable, summarize
from torch_py_backend.loading import discovery
from torch_py_backend.loading.discovery import Artifact

_Built = TypeVar("_Built")

# The class or function that weights_only refuses, in the message of torch.load.
_REFUSED = re.compile(r"GLOBAL (\S+) was not an allowed global")
# Bytes of a storage that are compared first: comparing all of each pair takes minutes.
_FINGERPRINT = 64


def load_into(
    config: ModelConfig,
    artifact: Artifact,
    module: nn.Module,
) -> None:
    """Load the weights into the module: all keys, no other keys, the same shapes."""
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
        with contextlib.nullcontext() if copied else AliasOnCopy(state.values()):
            module.load_state_dict(state)
    except Exception as error:  # the module may load the entries with code of its own
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:2000]
        raise ArtifactError(
            f"the weights in {artifact.weights.name} do not fit the module: {printable(reason)}",
            cure="Set MODEL_KWARGS (model_kwargs of save_model) to the constructor's arguments; or"
            " save the state_dict() of the class itself, not of a DataParallel or compiled module.",
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
        found = f"cannot be read: {summarize(error)}"
        if refused := _REFUSED.search(str(error)):
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

    Drawing takes seconds per gigabyte, so the functions of `torch.nn.init` that draw do nothing
    meanwhile. The module is built again, with values, after other random operations, or if the file
    that `saved` reads does not fill all tensors: others may be computed from values not drawn.
    """
    random_state = torch.random.get_rng_state()
    # The second call raises an exception, too, or succeeds.
    with contextlib.ExitStack() as stack, contextlib.suppress(Exception):
        for name, function in inspect.getmembers(nn.init, inspect.isfunction):
            parameters = inspect.signature(function).parameters
            if name.endswith("_") and "generator" in parameters:
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
    filled = set()
    for key, tensor in module.state_dict(keep_vars=True).items():
        shape = getattr(saved.get(key), "shape", None)
        if isinstance(tensor, Tensor) and shape == tensor.shape:
            filled.add(storage_id(tensor))
    leaves = pytree.tree_leaves([vars(part) for part in module.modules()])
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return filled.issuperset(map(storage_id, tensors))


class AliasOnCopy(TorchFunctionMode):
    """A mode under which copying mapped memory into a weight makes it a view of that memory.

    `load_state_dict` ends in `Tensor.copy_`, also in modules that translate keys or convert values.
    Its `assign=True` would replace the Parameter objects that a module may also hold elsewhere, and
    take over the file's dtypes and layouts. A weight is copied where the two differ in dtype, shape
    or layout, and where another tensor is a view of it, which would keep the old values.
    """

    def __init__(self, mapped: Iterable[Tensor]) -> None:
        super().__init__()
        self._mapped = {storage_id(tensor) for tensor in mapped if has_plain_storage(tensor)}
        self._weights: dict[int, Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if (
            func is Tensor.copy_
            and has_plain_storage(weight := args[0])
            and has_plain_storage(mapped := args[1])
            and storage_id(mapped) in self._mapped
            and weight.type() == mapped.type()  # the same device and dtype
            and weight.shape == mapped.shape
            and weight.is_contiguous()
            and mapped.is_contiguous()
            and has_no_other_views(weight)
            # Two weights that are one in the file must differ after the model writes into one.
            and self._weights.setdefault(mapped.data_ptr(), weight) is weight
        ):
            # The storage becomes the weight's own: readers return one for all tensors of a file.
            start = mapped.storage_offset() * mapped.element_size()
            storage = mapped.untyped_storage()[start : start + mapped.nbytes]
            return weight.set_(storage, 0, weight.shape, weight.stride())
        return func(*args, **(kwargs or {}))


def has_plain_storage(value: Any) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor that another storage of the same bytes can stand in for.

    False for sparse and quantized tensors, subclasses other than Parameter, and empty tensors.
    """
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout == torch.strided
        and not value.is_quantized
        and value.numel() > 0
    )


def has_no_other_views(*weights: Tensor) -> bool:
    """Return whether no other tensor uses the storage that all of these share."""
    # The Python object of the storage counts as well.
    users: int = torch._C._storage_Use_Count(storage_id(weights[0]))
    return users <= len(weights) + 1


def storage_id(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage; the address is 0 for all storages of no bytes."""
    number: int = tensor.untyped_storage()._cdata
    return number


def share(weights: Iterable[object], archive: Path) -> None:
    """Make weights, each of which is given once, views of the archive that they were read from.

    They are found by their bytes among the uncompressed members: only equal values are shared.
    """
    by_storage = defaultdict(list)
    for weight in weights:
        if has_plain_storage(weight) and weight.device.type == "cpu":
            by_storage[storage_id(weight)].append(weight)
    records = defaultdict(list)
    for record in _stored_members(archive):
        records[_fingerprint(record)].append(record)
    for sharers in by_storage.values():
        storage = sharers[0].untyped_storage()
        # Views that other objects hold must keep the memory.
        if not has_no_other_views(*sharers):
            continue
        candidates = records[_fingerprint(storage)]
        for index, record in enumerate(candidates):
            if torch.equal(_as_bytes(storage), _as_bytes(record)):
                del candidates[index]  # another weight of equal values needs a record of its own
                with torch.no_grad():
                    for weight in sharers:
                        weight.set_(record, weight.storage_offset(), weight.shape, weight.stride())
                break


def _stored_members(archive: Path) -> Iterator[torch.UntypedStorage]:
    """Yield each uncompressed member of an archive as memory of the mapped file."""
    path = str(archive)
    size = archive.stat().st_size
    file: Any = torch.UntypedStorage.from_file(path, shared=False, nbytes=size)
    reader: Any = torch._C.PyTorchFileReader(path)
    for member in discovery.members(archive):
        name = member.filename.partition("/")[2]
        is_stored = member.compress_type == zipfile.ZIP_STORED and member.file_size
        if is_stored and reader.has_record(name):  # others were added to the archive
            start = reader.get_record_offset(name)
            yield file[start : start + member.file_size]


def _fingerprint(storage: torch.UntypedStorage) -> tuple[int, bytes]:
    """Return the size and the first bytes of a storage: many weights of a model have one size."""
    return storage.nbytes(), _as_bytes(storage)[:_FINGERPRINT].numpy().tobytes()


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class Mapped(NamedTuple):
    """The bytes of weights in mapped files, and those of all weights."""

    shared: int
    total: int

    def __str__(self) -> str:
        return f"{self.shared / 1e6:,.1f} MB of {self.total / 1e6:,.1f} MB"


def measure(weights: Iterable[object]) -> Mapped:
    """Return which weights are in mapped files, according to /proc/self/maps."""
    edges: list[int] = []  # the start and the end of each mapped file, in ascending order
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for line in maps.splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        if inode != "0":
            edges += (int(address, 16) for address in addresses.split("-"))
    shared = total = 0
    storages = {storage_id(weight): weight for weight in weights if has_plain_storage(weight)}
    for weight in storages.values():
        storage = weight.untyped_storage()
        total += storage.nbytes()
        # Behind an odd number of edges: behind a start, and before its end.
        if weight.device.type == "cpu" and bisect.bisect_right(edges, storage.data_ptr()) % 2:
            shared += storage.nbytes()
    return Mapped(shared, total)
