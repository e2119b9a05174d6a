"""Models that start together load in turn, as far as memory and cores do not bear all at once.

Each loader of a server holds a ticket: a locked file that says what its load claims. The first in
line is let in when nobody loads; or when fewer than PARALLEL_LOADS do, and all that is claimed fits
into the memory that is free. What a loader has taken so far counts twice then, as claimed and as no
longer free: rather too few load at once than too many.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch_py_backend.artifacts import file_types
from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.config import threads
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import PlatformError, brief
from torch_py_backend.processes import server_folder

log = logging.getLogger(__name__)

_LOCK = "lock"
_SUFFIX = ".ticket"
_POLL_S = 0.03
_PATIENCE_S = 5.0  # what waits longer, says for whom
# Objects, code and buffers, whatever the size of the weights. What torch itself takes, it takes
# before anything is loaded.
_CONSTANT = 64 << 20


@dataclass(frozen=True, slots=True)
class Claim:
    """What a load takes while it lasts, in bytes.

    Attributes:
        host: of the machine's memory.
        device: of the GPU's.
        gpu: the ordinal of that GPU; None: the model is not loaded on one.
    """

    host: int
    device: int = 0
    gpu: int | None = None


def claim(config: ModelConfig, artifact: Artifact, *, on_gpu: bool) -> Claim:
    """What loading an artifact takes at its height.

    That is the size of its files once, whatever its kind (measured with 256 MB on a CPU: copied
    modules, TorchScript and exported programs all peak at 1.00 to 1.01 of it); `freeze` makes a
    second copy. A model on a GPU passes through the machine's memory. Weights that stay in their
    file take none.
    """
    size = sum(path.stat().st_size for path in artifact.files())
    if not on_gpu and _mapped(config, artifact):
        return Claim(_CONSTANT)
    copies = 2 if "freeze" in config.options.optimize else 1
    needed = copies * size + _CONSTANT
    if not on_gpu:
        return Claim(needed)
    return Claim(size + _CONSTANT, needed, config.device_id)


def _mapped(config: ModelConfig, artifact: Artifact) -> bool:
    """Whether a module's weights stay in their file; programs are copied before they are shared."""
    if artifact.weights is None or config.options.enable_weight_sharing is False:
        return False
    try:
        return not (config.options.optimize or file_types.unmappable(artifact.weights))
    except (OSError, zipfile.BadZipFile):  # the load says why
        return False


@contextlib.contextmanager
def turn(
    config: ModelConfig, claimed: Claim, device_free: Callable[[], int] | None = None
) -> Iterator[None]:
    """Wait until the load may begin; the others wait until it is done.

    Args:
        config: whose load it is.
        claimed: what it takes.
        device_free: what the claim's GPU has left; asked only where others load, too.

    Raises:
        PlatformError: PARALLEL_LOADS is set, and there is no folder to meet the others in.
    """
    try:
        room = server_folder.enter(config.name)
    except PlatformError as error:
        if config.options.parallel_loads is not None:
            raise
        log.warning("%s It loads without waiting for others.", error)
        yield
        return
    mine = _Ticket(config.instance, config.options.parallel_loads or threads.cores(), claimed)
    with contextlib.ExitStack() as stack:
        stack.callback(room.leave)
        try:
            place = stack.enter_context(_Line(room.folder("loading")).joined(mine))
            _wait(config.name, place, device_free)
        except OSError as error:  # a full disk keeps no model from serving
            log.warning(
                "model '%s' loads without waiting for others: %s.", config.name, brief(error)
            )
        yield


def _wait(model: str, place: _Place, device_free: Callable[[], int] | None) -> None:
    patience = time.monotonic() + _PATIENCE_S
    while blocking := place.begin(device_free):
        if time.monotonic() > patience:
            patience = math.inf
            log.info("model '%s' waits to load for %s.", model, ", ".join(blocking))
        time.sleep(_POLL_S)


# --- the line --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ticket:
    """One loader: who, how many it loads beside at most, what it takes, whether it loads yet."""

    instance: str
    most: int
    claim: Claim
    loads: bool = False

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> _Ticket:
        told = json.loads(path.read_bytes())
        return _Ticket(told["instance"], told["most"], Claim(**told["claim"]), told["loads"])


class _Line:
    """The tickets in a folder, in the order in which they came.

    Whoever looks at them or changes them holds `_LOCK` meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def joined(self, ticket: _Ticket) -> Iterator[_Place]:
        """A place at the end of the line; who leaves it lets the next one in."""
        with self.held():
            last = max((_number(path) for path in self._paths()), default=0)
            path = self._folder / f"{last + 1:012}{_SUFFIX}"
            locked = server_folder.lock(path)
            try:
                ticket.write(path)
            except OSError:
                path.unlink(missing_ok=True)
                if locked is not None:
                    server_folder.release(locked)
                raise
        if locked is None:
            raise RuntimeError(f"{path} is locked by another process")
        try:
            yield _Place(self, path, ticket)
        finally:
            with self.held():
                path.unlink(missing_ok=True)
                server_folder.release(locked)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While no other process looks."""
        descriptor = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def others(self, own: Path) -> list[tuple[int, _Ticket]]:
        """Who else is in line; tickets of processes that have died are removed."""
        found = []
        for path in self._paths():
            if path == own:
                continue
            abandoned = server_folder.lock(path)
            if abandoned is None:
                with contextlib.suppress(ValueError):  # the disk was full when it was written
                    found.append((_number(path), _Ticket.read(path)))
            else:
                path.unlink()
                server_folder.release(abandoned)
        return found

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_SUFFIX}"))


@dataclass(slots=True)
class _Place:
    """A loader's place in the line."""

    line: _Line
    path: Path
    ticket: _Ticket

    def begin(self, device_free: Callable[[], int] | None) -> list[str]:
        """Begin to load, if it may; else whom it waits for."""
        free = device_free() if device_free is not None else 0
        with self.line.held():
            others = self.line.others(self.path)
            loading = [one for _, one in others if one.loads]
            earlier = [one for place, one in others if place < _number(self.path) and not one.loads]
            if earlier or (loading and not _fits(self.ticket, loading, free)):
                return [one.instance for one in (*loading, *earlier)]
            replace(self.ticket, loads=True).write(self.path)
            return []


def _number(path: Path) -> int:
    return int(path.name.removesuffix(_SUFFIX))


def _fits(own: _Ticket, loading: Sequence[_Ticket], device_free: int) -> bool:
    """Whether a load may begin beside those that have begun."""
    if len(loading) >= min(own.most, *(one.most for one in loading)):
        return False
    claimed = [one.claim for one in (own, *loading)]
    if sum(one.host for one in claimed) > available():
        return False
    beside = sum(one.device for one in claimed if one.gpu == own.claim.gpu)
    return own.claim.gpu is None or beside <= device_free


# --- memory ----------------------------------------------------------------------------------

# By hand: the Python of a server that the backend is installed for need not have psutil.
_MEMINFO = Path("/proc/meminfo")
_OWN = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")


def available(meminfo: Path = _MEMINFO, own: Path = _OWN, cgroup: Path = _CGROUP) -> int:
    """Bytes that this process could still have: of the machine's, within the container's limits."""
    known = _fields(meminfo)
    return min([known["MemAvailable:"] * 1024, *_left(own, cgroup)])


def _left(own: Path, cgroup: Path) -> Iterator[int]:
    """What the limits leave: those of the group that this process is in, and of those above it."""
    for controllers, name in _groups(own):
        mount = cgroup / "memory" if controllers else cgroup
        names = _V1 if controllers else _V2
        path = mount / name.lstrip("/")
        # Within a container, the group's own name may lead nowhere: there, it is the mount itself.
        for folder in [path, *path.parents]:
            if folder.is_relative_to(mount):
                yield from _left_in(folder, *names)


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "active_file", "inactive_file")


def _groups(own: Path) -> Iterator[tuple[str, str]]:
    """Controllers and name of the groups that count memory; version 2 has no controllers there."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            yield controllers, name


def _left_in(folder: Path, limit: str, usage: str, *cached: str) -> Iterator[int]:
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        used = int((folder / usage).read_text(encoding="ascii"))
        known = _fields(folder / "memory.stat")
    except OSError:
        return
    if most != "max":
        # Files in the page cache count as used, and give way.
        yield max(0, int(most) - used + sum(known.get(key, 0) for key in cached))


def _fields(path: Path) -> dict[str, int]:
    lines = path.read_text(encoding="ascii").splitlines()
    return {words[0]: int(words[1]) for line in lines if len(words := line.split()) > 1}
