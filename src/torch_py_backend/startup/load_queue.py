"""A queue that limits how many models load at once, by memory and by number.

Each loader of a server holds a ticket: a locked file with the memory that its load needs. The first
ticket in the queue begins if no other load is running, or if fewer than PARALLEL_LOADS are and all
of them together fit into the free memory. Memory that a running load has already taken counts
twice, in its ticket and as not free: too few loads at once are safer than too many.

A load can need more memory than its model afterwards: TorchScript and exported programs are copied
before their weights are shared, and `freeze` makes a second copy.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch_py_backend.artifacts import discovery
from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.config import threads
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import PlatformError, summarize
from torch_py_backend.processes import private_files, server_folder

log = logging.getLogger(__name__)

# While its lock is held, no other process reads or changes tickets.
_LOCK = "lock"
_SUFFIX = ".ticket"
_POLL_S = 0.03
_PATIENCE_S = 5.0  # after this time, a loader logs which models it waits for
# Objects, code and buffers, whatever the size of the weights. torch's own memory is allocated
# before.
_CONSTANT = 64 << 20


@dataclass(frozen=True, slots=True)
class Ticket:
    """One load, and the memory that it needs at its peak, in bytes.

    Attributes:
        max_parallel: how many loads may run at the same time.
        host: memory of the machine.
        device: memory of the GPU.
        gpu: the ordinal of that GPU; None: the model is not loaded on one.
        loads: whether the load has begun.
    """

    instance: str
    max_parallel: int
    host: int
    device: int = 0
    gpu: int | None = None
    loads: bool = False

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def fits(self, loading: Sequence[Ticket], device_free: int) -> bool:
        """Return whether this load may begin beside those that are running."""
        tickets = [self, *loading]
        if len(loading) >= min(ticket.max_parallel for ticket in tickets):
            return False
        if sum(ticket.host for ticket in tickets) > available_memory():
            return False
        on_gpu = sum(ticket.device for ticket in tickets if ticket.gpu == self.gpu)
        return self.gpu is None or on_gpu <= device_free


def ticket(config: ModelConfig, artifact: Artifact, *, on_gpu: bool) -> Ticket:
    """Return the ticket for loading an artifact.

    The memory is the size of the files (measured with 256 MB on a CPU: copied modules, TorchScript
    and exported programs all peak at 1.00 to 1.01 times that); `freeze` makes a second copy. A
    model on a GPU passes through the machine's memory. Weights that are mapped need none.
    """
    max_parallel = config.options.parallel_loads or threads.available_cores()
    size = sum(path.stat().st_size for path in artifact.files())
    # Programs are copied before they are shared.
    mapped = artifact.weights is not None and not discovery.mapping_obstacle(config, artifact)
    if mapped and not on_gpu and not config.options.optimize:
        return Ticket(config.instance, max_parallel, _CONSTANT)
    copies = 2 if "freeze" in config.options.optimize else 1
    needed = copies * size + _CONSTANT
    if not on_gpu:
        return Ticket(config.instance, max_parallel, needed)
    return Ticket(config.instance, max_parallel, size + _CONSTANT, needed, config.device_id)


@contextlib.contextmanager
def acquire(
    config: ModelConfig, ticket: Ticket, device_free: Callable[[], int] | None = None
) -> Iterator[None]:
    """Wait until the load may begin, and hold its ticket until it is done.

    `device_free` returns the free memory of the ticket's GPU.

    Raises:
        PlatformError: PARALLEL_LOADS is set, and the server's folder cannot be used.
    """
    try:
        shared_folder = server_folder.enter(config.name)
    except PlatformError as error:
        if config.options.parallel_loads is not None:
            raise
        log.warning("%s It loads without waiting for others.", error)
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.callback(shared_folder.leave)
        try:
            path = stack.enter_context(join(shared_folder.folder("loading"), ticket))
            patience = time.monotonic() + _PATIENCE_S
            while blocking := begin(path, ticket, device_free() if device_free else 0):
                if time.monotonic() > patience:
                    patience = math.inf
                    log.info("model '%s' waits to load for %s.", config.name, ", ".join(blocking))
                time.sleep(_POLL_S)
        except OSError as error:  # such as a full disk
            log.warning(
                "model '%s' loads without waiting for others: %s.", config.name, summarize(error)
            )
        yield


# --- the queue -------------------------------------------------------------------------------


@contextlib.contextmanager
def join(folder: Path, ticket: Ticket) -> Iterator[Path]:
    """Hold a ticket at the end of the queue; yield its path. Paths have the order of arrival."""
    with private_files.locked(folder / _LOCK):
        last = max((int(path.stem) for path in folder.glob(f"*{_SUFFIX}")), default=0)
        path = folder / f"{last + 1:012}{_SUFFIX}"
        lock = server_folder.lock(path)
        assert lock is not None  # noqa: S101  the path is new
        try:
            # Before others read the queue: an empty ticket would be passed over.
            ticket.write(path)
        except BaseException:
            path.unlink(missing_ok=True)
            server_folder.release(lock)
            raise
    try:
        yield path
    finally:
        try:
            with private_files.locked(folder / _LOCK):
                path.unlink(missing_ok=True)
        finally:
            server_folder.release(lock)


def begin(path: Path, ticket: Ticket, device_free: int) -> list[str]:
    """Begin to load if it is allowed; otherwise return the instances that it waits for."""
    with private_files.locked(path.parent / _LOCK):
        others = _live_tickets(path)
        loading = [other for other in others.values() if other.loads]
        earlier = [other for at, other in others.items() if at < path and not other.loads]
        if earlier or (loading and not ticket.fits(loading, device_free)):
            return [other.instance for other in (*loading, *earlier)]
        replace(ticket, loads=True).write(path)
        return []


def _live_tickets(own_path: Path) -> dict[Path, Ticket]:
    """Return the other tickets by path, and remove those of dead processes."""
    tickets = {}
    for path in sorted(own_path.parent.glob(f"*{_SUFFIX}")):
        if path == own_path:
            continue
        lock = server_folder.lock(path)
        if lock is None:
            # The disk was full when it was written, or another version of this package wrote it:
            # `install` can replace the package while models load.
            with contextlib.suppress(ValueError, TypeError):
                tickets[path] = Ticket(**json.loads(path.read_bytes()))
        else:
            path.unlink()
            server_folder.release(lock)
    return tickets


# --- memory ----------------------------------------------------------------------------------

# Read here, because the Python of the server need not have psutil.
_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")
# The limit, the usage, and the counters of the page cache in both versions of control groups.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "active_file", "inactive_file")


def available_memory(
    meminfo: Path = _MEMINFO, own_groups: Path = _OWN_GROUPS, cgroup: Path = _CGROUP
) -> int:
    """Return the bytes that are available: of the machine, within the limits of the container."""
    machine = _counters(meminfo)["MemAvailable:"] * 1024
    return min([machine, *_below_limits(own_groups, cgroup)])


def _below_limits(own_groups: Path, cgroup: Path) -> Iterator[int]:
    """Yield the bytes below each limit of this process's control group and its ancestors."""
    try:
        lines = own_groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # Version 2 has no controllers.
        mount, names = (cgroup / "memory", _V1) if controllers else (cgroup, _V2)
        limit, usage, *cached = names
        path = mount / name.lstrip("/")
        for folder in [path, *path.parents]:
            if not folder.is_relative_to(mount):
                break
            # In a container the group may be the mount itself, and the path of its name not exist.
            with contextlib.suppress(OSError):
                max_bytes = (folder / limit).read_text(encoding="ascii").strip()
                used = int((folder / usage).read_text(encoding="ascii"))
                counters = _counters(folder / "memory.stat")
                if max_bytes != "max":
                    # The page cache counts as used, and is reclaimed when memory is needed.
                    used -= sum(counters.get(key, 0) for key in cached)
                    yield max(0, int(max_bytes) - used)


def _counters(path: Path) -> dict[str, int]:
    lines = path.read_text(encoding="ascii").splitlines()
    return {words[0]: int(words[1]) for line in lines if len(words := line.split()) > 1}
