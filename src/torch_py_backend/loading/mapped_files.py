"""Weights as parts of mapped files: all processes of a machine share their pages.

Files are mapped privately: what a model writes into its weights stays in its process, and never
reaches the file. See mmap(2), MAP_PRIVATE.
"""

from __future__ import annotations

import bisect
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# A local file header: 26 bytes, the lengths of the name and of the extra field, those two.
# See 4.3.7 of the ZIP specification, APPNOTE.TXT.
_HEADER = 30
_LENGTHS = struct.Struct("<HH")
# Bytes at either end of a storage.
_OUTLINE = 64


class Mode(TorchDispatchMode):
    """Sees all that torch computes within, while a model is built: nothing is compiled there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To keep torch.compile out of a mode torch imports it: 1.1 s in each instance, and 50 MB.
        return False


class Adopting(Mode):
    """Within, a copy of mapped memory into a module's weight makes the weight lie there instead.

    Whatever `load_state_dict` is made of, it ends in `Tensor.copy_`: modules that translate keys,
    or that compute what they load, need no other treatment. A weight is copied where the two
    differ in type, shape or layout, and where something else holds a view of it, which would go on
    showing the old values.
    """

    def __init__(self, mapped: Iterable[Tensor]) -> None:
        super().__init__()
        self._mapped = {storage_id(tensor) for tensor in mapped if is_plain(tensor)}
        self._places: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.copy_.default and self._adopt(*args[:2]):
            return args[0]
        return func(*args, **(kwargs or {}))

    def _adopt(self, weight: Tensor, mapped: Tensor) -> bool:
        if not is_plain(mapped) or storage_id(mapped) not in self._mapped:
            return False
        if not _interchangeable(weight, mapped) or not is_alone(weight):
            return False
        # Two weights that are one in the file are told apart by a model that writes into one.
        if self._places.setdefault(mapped.data_ptr(), weight) is not weight:
            return False
        place(weight, mapped)
        return True


def _interchangeable(weight: Tensor, mapped: Tensor) -> bool:
    return (
        is_plain(weight)
        and weight.device == mapped.device
        and weight.dtype == mapped.dtype
        and weight.shape == mapped.shape
        and weight.stride() == mapped.stride()
    )


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor whose values lie in its storage and nowhere else.

    Not so are sparse and quantised ones, those of other classes than torch's two, and empty ones;
    and what a module's state_dict may hold that is no tensor at all.
    """
    return (
        type(value) in (Tensor, nn.Parameter)
        and isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and value.numel() > 0
    )


def is_alone(*weights: Tensor) -> bool:
    """Whether nobody else looks at the storage that all of these share."""
    # The storage's own Python object holds it, too.
    holders: int = torch._C._storage_Use_Count(storage_id(weights[0]))
    return holders <= len(weights) + 1


def storage_id(tensor: Tensor) -> int:
    """What tells storages apart; tensors of no bytes have none that an address would tell."""
    number: int = tensor.untyped_storage()._cdata
    return number


def place(weight: Tensor, mapped: Tensor) -> None:
    """Let the weight lie where `mapped` does; it stays the same object."""
    # A storage of its own: readers give all tensors of a file one.
    size = mapped.element_size()
    places = zip(mapped.shape, mapped.stride(), strict=True)
    reach = sum((length - 1) * stride for length, stride in places)
    first = mapped.storage_offset() * size
    own = mapped.untyped_storage()[first : first + (reach + 1) * size]
    with torch.no_grad():
        weight.set_(own, 0, mapped.shape, mapped.stride())


# --- archives ----------------------------------------------------------------------------------


def share(weights: Iterable[object], archive: Path) -> None:
    """Let weights lie in the archive that they were read from.

    They are found by their bytes: nothing is shared that is not equal, and any format will do that
    keeps tensors as uncompressed members of a zip archive, as TorchScript and torch.export do.

    Raises:
        OSError, ValueError, zipfile.BadZipFile: it is no archive that can be read.
    """
    by_storage = defaultdict(list)
    for weight in {id(weight): weight for weight in weights}.values():
        if is_plain(weight) and weight.device.type == "cpu":
            by_storage[storage_id(weight)].append(weight)
    records = defaultdict(list)
    whole = _map(archive)
    for start, size in stored(archive):
        record = whole[start : start + size]
        records[_outline(record)].append(record)
    for sharers in by_storage.values():
        storage = sharers[0].untyped_storage()
        # What somebody else holds a view of, must stay where that looks.
        if not is_alone(*sharers):
            continue
        candidates = records[_outline(storage)]
        record = next((one for one in candidates if torch.equal(*_bytes(storage, one))), None)
        if record is not None:
            # Two weights of equal values are two all the same.
            candidates[:] = [one for one in candidates if one is not record]
            for weight in sharers:
                with torch.no_grad():
                    weight.set_(record, weight.storage_offset(), weight.shape, weight.stride())


def _map(path: Path) -> torch.UntypedStorage:
    size = path.stat().st_size
    mapped = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size)
    return cast(torch.UntypedStorage, mapped)  # torch says: any kind of storage


def stored(archive: Path) -> Iterator[tuple[int, int]]:
    """Where an archive's uncompressed members lie: their first bytes, and their sizes.

    Raises:
        OSError, zipfile.BadZipFile: it is no archive that can be read.
    """
    with zipfile.ZipFile(archive) as members, archive.open("rb") as file:
        for member in members.infolist():
            if member.compress_type == zipfile.ZIP_STORED and member.file_size:
                file.seek(member.header_offset + _HEADER - _LENGTHS.size)
                name, extra = _LENGTHS.unpack(file.read(_LENGTHS.size))
                yield member.header_offset + _HEADER + name + extra, member.file_size


def _outline(storage: torch.UntypedStorage) -> tuple[int, bytes, bytes]:
    """What tells most storages apart: models have many weights of one size."""
    (whole,) = _bytes(storage)
    return storage.nbytes(), _plain(whole[:_OUTLINE]), _plain(whole[-_OUTLINE:])


def _plain(part: Tensor) -> bytes:
    return part.numpy().tobytes()


def _bytes(*storages: torch.UntypedStorage) -> list[Tensor]:
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages]


# --- what became of it -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mapped:
    """Weights that lie in mapped files.

    Attributes:
        shared: their bytes.
        total: the bytes of all weights.
        ranges: the addresses that those files are mapped to, first and behind the last.
    """

    shared: int
    total: int
    ranges: tuple[tuple[int, int], ...]


def find(weights: Iterable[object]) -> Mapped:
    """Which weights lie in files, by the kernel's own table of this process, /proc/self/maps."""
    files = list(_file_ranges())
    starts = [start for start, _ in files]
    shared = total = 0
    ranges = set()
    storages = {storage_id(weight): weight for weight in weights if is_plain(weight)}
    for weight in storages.values():
        storage = weight.untyped_storage()
        total += storage.nbytes()
        if weight.device.type == "cpu":
            position = bisect.bisect_right(starts, storage.data_ptr()) - 1
            if position >= 0 and storage.data_ptr() < files[position][1]:
                shared += storage.nbytes()
                ranges.add(files[position])
    return Mapped(shared, total, tuple(sorted(ranges)))


def _file_ranges() -> Iterator[tuple[int, int]]:
    """The addresses that files are mapped to, in ascending order."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            addresses, _, _, _, inode, *_ = line.split()
            if inode != "0":
                start, _, end = addresses.partition("-")
                yield int(start, 16), int(end, 16)
