"""TENSOR_PARALLEL: one model computed by several processes, each with its share of the weights.

The instance is the first rank; it starts the others, which load the same artifact. For each batch
it tells them what forward() is called with: structure and plain values over their sockets, tensors
by a broadcast. All call forward(), and meet in the collectives that the plan puts into it. The
others say how it went, and the first one answers.

Ranks that fail alike go on. Where one fails alone, dies, or does not come to an end, all are lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import pickle
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_py_backend import loaders, rendezvous, runtime, sharing, trees, workers
from torch_py_backend.artifacts import Artifact
from torch_py_backend.config import ModelConfig
from torch_py_backend.errors import (
    BackendError,
    LoadError,
    PlatformError,
    WorkerError,
    brief,
    shown,
)
from torch_py_backend.guarding import Guard
from torch_py_backend.loaders import Loaded
from torch_py_backend.threads import Threads
from torch_py_backend.workers import Workers

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_WORK = "torch_py_backend.ranks:work"
# A worker that dies is noticed at once; this is for one that hangs.
_LOAD_S = 3600.0
# Within a batch, in which ranks meet again and again.
_COLLECTIVE = timedelta(minutes=5)
_SEEDS = 1 << 62
# Instead of a call: all add up ones.
_CHECK = b""


@dataclass(frozen=True, slots=True)
class _Job:
    """What a rank is to do.

    Attributes:
        store: the file in which ranks find each other.
        seed: what they draw alike with, at load.
        patience: seconds that one that has failed waits for the first to fail, too.
    """

    config: ModelConfig
    artifact: Artifact
    store: Path
    rank: int
    seed: int
    threads: Threads
    patience: float

    @property
    def size(self) -> int:
        return self.config.options.tensor_parallel or 1


def load(config: ModelConfig, artifact: Artifact) -> Loaded:
    """The model, whose calls are computed by all ranks; this process is the first.

    Raises:
        LoadError: a rank cannot load it, or there is no plan that fits it.
        PlatformError: there are fewer GPUs than ranks.
        WorkerError: a rank died.
    """
    first = _Job(
        config=config,
        artifact=artifact,
        store=Path(),
        rank=0,
        seed=torch.seed(),
        threads=Threads(torch.get_num_threads(), torch.get_num_interop_threads()),
        patience=workers.GRACE_S,
    )
    _refuse_missing(config, first.size)
    with contextlib.ExitStack() as stack:
        room = rendezvous.enter(config.name)
        stack.callback(room.leave)
        first = dataclasses.replace(first, store=room.folder("ranks") / uuid.uuid4().hex)
        stack.callback(first.store.unlink, missing_ok=True)
        others = Workers(config.name, _WORK, first.size - 1)
        stack.callback(others.end)
        # One that still loads does not listen.
        stack.push(lambda kind, *_: others.kill() if kind is not None else None)
        jobs = [dataclasses.replace(first, rank=rank) for rank in range(1, first.size)]
        others.tell([pickle.dumps(job) for job in jobs])
        share = _Share(first)
        _confirm(others.refusal(_LOAD_S))
        others.tell([_CHECK])
        stack.callback(share.leave)
        # In a store and in sockets of torch's own, which tell of no process that has died.
        _confirm(others.accompany(share.meet))
        share.divide()
        _confirm(others.refusal(_LOAD_S))
        log.info("model '%s': computed with processes %s.", config.name, others.processes)
        ranks = Ranks(share, others, stack.pop_all())
    return dataclasses.replace(share.loaded, module=ranks, leave=ranks.leave, watch=ranks.watch)


def _refuse_missing(config: ModelConfig, size: int) -> None:
    if not dist.is_available():
        raise PlatformError(
            config.name, f"TENSOR_PARALLEL is set, and torch {torch.__version__} has no distributed"
        )
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.kind == "MODEL" and 0 < seen < size:
        raise PlatformError(
            config.name,
            f"TENSOR_PARALLEL is {size}, and torch {torch.__version__} sees {seen} GPUs",
            cure="Use KIND_CPU, or as many processes as there are GPUs.",
        )


def _confirm(refusal: str) -> None:
    """Raise what another rank could not do."""
    if refusal:
        raise LoadError.told(refusal)


class _Share:
    """What one rank holds and computes of a model.

    Attributes:
        loaded: the model; all of it, until `divide`.
        device: where it is.
        patience: seconds that it waits for the first rank to fail, where it has failed itself.
    """

    def __init__(self, job: _Job) -> None:
        self._job = job
        self.patience = job.patience
        on_gpu = job.config.kind == "MODEL" and torch.cuda.is_available()
        self.device = torch.device("cuda", job.rank) if on_gpu else _CPU
        if on_gpu:
            torch.cuda.set_device(self.device)
        # What no file fills is drawn alike.
        torch.manual_seed(job.seed)
        self.loaded = loaders.load(job.artifact, job.config, _CPU)
        self._called = self.loaded.module
        # Takes a second to import.
        from torch_py_backend import plans  # noqa: PLC0415

        owner = self.loaded.owner
        assert owner is not None  # noqa: S101  functions are refused when they are loaded
        self._owner, self._plan = owner, plans.find(job.config, owner)

    def meet(self) -> None:
        """Meet the other ranks.

        Raises:
            PlatformError: torch's processes cannot reach each other.
        """
        job = self._job
        # All ranks are of this machine: nobody else is to reach them.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        try:
            dist.init_process_group(
                "gloo" if self.device == _CPU else "nccl",
                store=dist.FileStore(str(job.store), job.size),  # type: ignore[attr-defined]
                rank=job.rank,
                world_size=job.size,
                timeout=_COLLECTIVE,
            )
        except Exception as error:  # no loopback interface, or a group of the model's own
            raise PlatformError(
                job.config.name,
                f"the processes of TENSOR_PARALLEL cannot meet: {brief(error)}",
                expected="a loopback interface, and a model that starts no process group itself",
            ) from error

    def divide(self) -> None:
        """Let go of what is the other ranks' to compute."""
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

        from torch_py_backend import plans  # noqa: PLC0415

        job, config = self._job, self._job.config
        mesh = init_device_mesh(self.device.type, (job.size,))
        mapped = job.artifact.weights is not None
        whole = mapped and config.options.enable_weight_sharing is not False
        plans.apply(config, self._owner, self._plan, mesh, whole=whole)
        uneven = plans.uneven(self._owner)
        if uneven:
            log.warning(
                "model '%s': %s cannot be divided evenly among %d processes. Outputs that the plan"
                " leaves in shares do not fit what follows: use output_layouts=Replicate() there.",
                config.name,
                shown(uneven),
                job.size,
            )
        if self.device != _CPU:
            self._owner.to(self.device)

    def leave(self) -> None:
        """Leave the other ranks."""
        # NCCL would wait for ranks that have left: its part ends with the process.
        if self.device == _CPU and dist.is_initialized():
            dist.destroy_process_group()

    def compute(self, seed: int, args: Any, kwargs: Any) -> Any:
        """What the whole model returns; all ranks call this at the same time."""
        torch.manual_seed(seed)
        # Under inference_mode a Linear is one operation for DTensor, which gathers what it has
        # shared out instead of adding up.
        with torch.inference_mode(mode=False), torch.no_grad():
            args, kwargs = trees.changed((args, kwargs), _plain)
            return trees.changed(self._called(*args, **kwargs), _whole)

    def check(self) -> None:
        """See that all ranks are here, and none is elsewhere.

        Raises:
            RuntimeError: one is not.
        """
        ones = torch.ones(1, device=self.device)
        dist.all_reduce(ones)
        if ones.item() != self._job.size:
            raise RuntimeError(f"ranks are out of step: {ones.item()} of {self._job.size}")


def _plain(tensor: Tensor) -> Tensor:
    """A tensor that may be written to outside of inference_mode, too."""
    return tensor.clone() if tensor.is_inference() else tensor


def _whole(tensor: Tensor) -> Tensor:
    """A tensor that the plan leaves in shares, put together; one that is on its way, arrived."""
    for name in ("full_tensor", "wait"):  # of a DTensor, and of torch's AsyncCollectiveTensor
        change: Callable[[], Tensor] | None = getattr(tensor, name, None)
        tensor = tensor if change is None else change()
    return tensor


class Ranks:
    """What the engine calls: the module of all ranks.

    Args:
        share: this process's own.
        others: the other ranks.
        stack: what ends them.
    """

    def __init__(self, share: _Share, others: Workers, stack: contextlib.ExitStack) -> None:
        self._share = share
        self._others = others
        self._stack = stack

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it on all ranks.

        Raises:
            WorkerError: a rank is lost, and so are all.
        """
        with self._others.turn:
            if self._others.lost is not None:
                raise self._others.lost
            # Each time anew: between two calls, others draw in this process and not in those.
            seed = int(torch.randint(_SEEDS, ()).item())
            message, tensors = _packed((seed, args, kwargs))
            self._others.tell([message])
            try:
                for tensor in tensors:
                    _broadcast(tensor.contiguous())
                result = self._share.compute(seed, args, kwargs)
            except BaseException as error:
                self._agree(error)
                raise
            self._agree(None)
            return result

    def _agree(self, error: BaseException | None) -> None:
        """See that all ranks came to the same end.

        Raises:
            WorkerError: they did not; they cannot go on.
        """
        own = "" if error is None else brief(error)
        told = self._others.answers(workers.GRACE_S, f" after {own} in the first" if own else "")
        for number, text in enumerate(told, start=1):
            # Of an exception its class: what it says may differ, of a process or a place in memory.
            if text.partition(":")[0] != own.partition(":")[0]:
                raise self._others.fail(
                    f"worker {number} came to another end, {text or 'a result'}, than the first"
                    f" process, {own or 'a result'}"
                ) from error
        if error is not None:
            self._check(own, told)

    def _check(self, own: str, told: Sequence[str]) -> None:
        """See that all ranks are here. Torch's own error in a collective is of a common class."""
        self._others.tell([_CHECK])
        try:
            self._share.check()
        except RuntimeError as error:
            ends = "; ".join(dict.fromkeys([*told, own]))
            raise self._others.fail(f"{brief(error)}, after {ends}") from error
        text = self._others.refusal(workers.GRACE_S)
        if text:
            raise self._others.fail(text)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"'{name}': with TENSOR_PARALLEL hooks can call the module and nothing else of it, for"
            " that alone is done by all processes; METHOD chooses another method than forward()"
        )

    def watch(self, lost: Callable[[WorkerError], None]) -> None:
        """Call `lost`, in a thread, when a rank dies between two calls."""
        self._others.watch(lost)

    def leave(self) -> None:
        """End the other ranks; to leave twice is no error."""
        self._stack.close()


# --- what is told ------------------------------------------------------------------------------


class _Packer(pickle.Pickler):
    """Leaves tensors out, and keeps them in their order."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj)
        return tuple(obj.shape), str(obj.dtype).removeprefix("torch.")


class _Unpacker(pickle.Unpickler):
    """Makes room for tensors."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._device = device

    def persistent_load(self, pid: Any) -> Tensor:
        shape, dtype = pid
        self.tensors.append(torch.empty(shape, dtype=getattr(torch, dtype), device=self._device))
        return self.tensors[-1]


def _packed(given: Any) -> tuple[bytes, list[Tensor]]:
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(given)
    return file.getvalue(), packer.tensors


def _broadcast(tensor: Tensor) -> None:
    """From the first rank to the others; as bytes, for gloo does not know all types."""
    if tensor.numel():
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)


# --- the other ranks ---------------------------------------------------------------------------


def work(connection: Connection) -> None:
    """A rank that is not the first: its process runs this, until the first one leaves."""
    # Of the process that started this one, which nobody else can write to.
    job: _Job = pickle.loads(connection.recv_bytes())  # noqa: S301
    # The first rank says the same.
    logging.getLogger("torch_py_backend").setLevel(logging.ERROR)
    runtime.settle(job.config.options, job.threads)
    try:
        share = _Share(job)
        connection.send_bytes(b"")
        connection.recv_bytes()
        share.meet()
        share.divide()
    except (EOFError, ConnectionError):
        raise
    except BaseException as error:
        known = isinstance(error, BackendError)
        refusal = error if known else LoadError(job.config.name, f"a worker raised {brief(error)}")
        connection.send_bytes(str(refusal).encode())
        return
    with _guarded(job, share):
        connection.send_bytes(b"")
        failed, patience = "", 0.0
        # One that failed, where the first did not, would keep that one in a collective.
        while not failed or connection.poll(patience):
            failed, patience = _follow(share, connection.recv_bytes())
            connection.send_bytes(failed.encode())


def _guarded(job: _Job, share: _Share) -> contextlib.AbstractContextManager[Any]:
    """Files that are mapped by this process are kept from changing under it."""
    ranges = sharing.mapped(share.loaded).ranges
    if not ranges:
        return contextlib.nullcontext()
    return contextlib.closing(Guard(job.config.name, job.artifact.weight_files(), ranges))


def _follow(share: _Share, message: bytes) -> tuple[str, float]:
    """Do what the first rank does.

    Returns:
        Why it failed, or nothing; and how many seconds the first one may take to fail as well.
    """
    patience = 0.0
    try:
        if message == _CHECK:
            share.check()
            return "", patience
        unpacker = _Unpacker(io.BytesIO(message), share.device)
        seed, args, kwargs = unpacker.load()
        for tensor in unpacker.tensors:
            _broadcast(tensor)
        # From here on what fails may fail in all ranks.
        patience = share.patience
        share.compute(seed, args, kwargs)
        if share.device.type == "cuda":
            torch.cuda.synchronize(share.device)
    except BaseException as error:
        return brief(error), patience
    return "", patience
