"""One copy of the weights on a GPU for all instances of a server: one owns it, the others map it.

The first instance loads as it would alone, and offers its parameters and buffers by name: which
allocation they lie in, where, with what type, size and strides. Each other builds the module, and
puts views of the mapped memory in the places of its own tensors.

When the owner leaves or dies, the others let go of the memory. At their next batch they elect
another, which loads anew. A batch during which the owner died is answered with an error: what it
computed is not to be trusted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from torch_py_backend.artifacts.discovery import Artifact, Kind
from torch_py_backend.compile import torch_compile
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError, UnavailableError, shown
from torch_py_backend.processes import server_folder
from torch_py_backend.weights import owner_election
from torch_py_backend.weights.cuda_ipc import CudaMemory, NotShared
from torch_py_backend.weights.owner_election import Owner, Sharer

log = logging.getLogger(__name__)

Weights: TypeAlias = "Mapping[str, Tensor]"
Facts: TypeAlias = "Mapping[str, list[Any]]"
# Options that decide which tensors there are, and what is in them.
_DECISIVE = ("model_class", "model_factory", "model_kwargs", "weights", "optimize", "fallback")


class Memory(Protocol):
    """A device's memory, as far as processes share it."""

    device: torch.device

    def name(self) -> str:
        """Which device it is of."""

    def export(self, tensor: Tensor) -> tuple[str, int]:
        """The allocation that a tensor lies in, as text; and where in it."""

    def open(self, block: str) -> Tensor:
        """An allocation of another process, as bytes."""

    def settle(self) -> None:
        """Wait until all that was begun on the device is done."""

    def trim(self) -> None:
        """Give back what torch keeps for later use."""


def wished(config: ModelConfig) -> bool:
    """Whether instances are to share what is on their GPU."""
    return config.kind != "CPU" and bool(config.options.enable_weight_sharing)


def refusal(config: ModelConfig, kind: Kind) -> str:
    """Why the weights of a model on a GPU cannot be shared; empty where they can."""
    if config.kind == "MODEL":
        return "the instance is KIND_MODEL: the model places itself"
    if kind is Kind.AOTI:
        return "an AOTInductor package keeps its constants in memory of its own"
    if kind is Kind.TORCHSERVE:
        return "the handler of a TorchServe archive puts its weights where it wants"
    if "freeze" in config.options.optimize:
        return "OPTIMIZE freezes them: they become constants of each instance's own graph"
    return ""


def key(config: ModelConfig, artifact: Artifact, device: str) -> str:
    """What instances have in common that may share: the same files, made into the same tensors."""
    facts = {
        "files": [
            (str(path.resolve()), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            for path in artifact.files()
            for found in [path.stat()]
        ],
        "options": {name: repr(getattr(config.options, name)) for name in _DECISIVE},
        "torch": torch.__version__,
        "device": device,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# --- one instance ----------------------------------------------------------------------------


def start(
    config: ModelConfig,
    artifact: Artifact,
    device: torch.device | None,
    afresh: Callable[[], nn.Module | None],
) -> Shared:
    """Take part in sharing: wait until the weights are offered, or until this instance owns them.

    Args:
        config: whose weights they are.
        artifact: what they are loaded from.
        device: where they are; None: the model places itself.
        afresh: loads them from their files once more, onto the device.

    Raises:
        ConfigError: they cannot be shared.
        PlatformError: there is no folder to meet the others in.
    """
    reason = refusal(config, artifact.kind)
    if reason or device is None:
        raise refused(config, reason)
    return Shared(config, artifact, CudaMemory(device), afresh)


class Shared:
    """One instance's part in sharing.

    Attributes:
        lock: held while the weights are used, or exchanged.
        final: whether the model remembers addresses, and cannot go on with other memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        artifact: Artifact,
        memory: Memory,
        afresh: Callable[[], nn.Module | None],
    ) -> None:
        self.lock = threading.RLock()
        self.final = "cuda_graphs" in config.options.optimize or torch_compile.requested(config)
        self._config = config
        self._memory = memory
        self._afresh = afresh
        self._unplaced: nn.Module | None = None
        self._places: Weights = {}
        self._facts: Facts = {}
        found = key(config, artifact, memory.name())
        self._room = server_folder.enter(config.name)
        try:
            self._folder = self._room.folder(f"weights-{found[:32]}")
            self._part: Owner | Sharer | None = owner_election.join(self._folder, config.instance)
        except BaseException:
            self._room.leave()
            raise

    @property
    def owns(self) -> bool:
        """Whether this instance owns the weights, and needs them on the device."""
        return isinstance(self._part, Owner)

    @property
    def present(self) -> bool:
        """Whether the weights are in their places."""
        return self._part is not None

    def hold(self, module: nn.Module | None, kind: Kind) -> None:
        """Share a module's weights from now on.

        Args:
            module: what holds them; one that does not own them may still be on the CPU.
            kind: what it was loaded from.

        Raises:
            ConfigError: they cannot be shared.
        """
        reason = refusal(self._config, kind)
        if reason or module is None or not named(module):
            raise refused(self._config, reason or "the model has none that are at hand")
        with self.lock:
            self._unplaced, self._places = module, named(module)
            self._facts = _facts(self._places)
            self._attach()
            self._recover()

    def ready(self) -> UnavailableError | None:
        """Make sure that the weights are there; what is wrong where they are not.

        To be called with the lock, before they are used.
        """
        if self._part is not None:
            return None
        if self.final:
            return self._unavailable(
                "its compiled code is bound to where they were", "The model must be loaded anew."
            )
        try:
            with torch.inference_mode(mode=False):
                self._recover()
        except Exception:  # files that are gone, memory that is short: another time, perhaps
            log.exception("model '%s': its weights cannot be loaded again", self._config.name)
            return self._unavailable("they cannot be loaded again", "The server's log says why.")
        return None

    def lost(self) -> UnavailableError | None:
        """What to answer where the weights may have gone while they were used.

        To be called with the lock, after they were used.
        """
        part = self._part
        if not isinstance(part, Sharer) or part.alive():
            return None
        self._let_go(part)
        return self._unavailable("this batch was computed meanwhile", "Send it again.")

    def leave(self) -> None:
        """Use the weights no more; the others may, as long as they need. Twice is no error."""
        with self.lock:
            part = self._part
            if isinstance(part, Sharer):
                self._let_go(part)
            self._part, self.final = None, True
        if isinstance(part, Owner):
            part.leave()
        self._room.leave()

    # --- exchange ---

    def _recover(self) -> None:
        while self._part is None:
            self._part = owner_election.join(self._folder, self._config.instance)
            self._attach()

    def _attach(self) -> None:
        """Have the weights in their places; without a part: their owner is gone meanwhile."""
        part = self._part
        try:
            if isinstance(part, Owner):
                self._own(part)
            elif part is not None and not self._map(part):
                self._let_go(part)
        except BaseException:
            self._part = None
            if part is not None:
                part.leave()
            raise

    def _own(self, part: Owner) -> None:
        weights: Weights = {}
        if self._unplaced is None:
            fresh = self._afresh()
            weights = {} if fresh is None else named(fresh)
            self._compare(_facts(weights), "their files")
        self._put(weights)
        self._memory.settle()
        try:
            part.offer(
                {
                    "instance": self._config.instance,
                    "facts": self._facts,
                    **_offered(self._places, self._memory),
                }
            )
        except NotShared as error:
            raise refused(self._config, str(error)) from error
        log.info("model '%s': '%s' owns the weights.", self._config.name, self._config.instance)

    def _map(self, part: Sharer) -> bool:
        """Whether what the owner offers is in its places, and the owner still lives."""
        offered = part.document
        self._compare(offered["facts"], f"'{offered['instance']}'")
        try:
            self._put(_views(offered, self._memory))
        except NotShared as error:
            if part.alive():
                raise refused(self._config, str(error)) from error
            return False
        self._memory.settle()
        self._memory.trim()
        if not part.alive():
            return False
        part.watch(lambda: self._ended(part))
        log.info(
            "model '%s': '%s' maps the weights of '%s'.",
            self._config.name,
            self._config.instance,
            offered["instance"],
        )
        return True

    def _put(self, weights: Weights) -> None:
        if self._unplaced is not None:
            _move(self._unplaced, weights, self._memory.device)
            self._places, self._unplaced = named(self._unplaced), None
        # What was placed before; and weights of RNNs, which a module that is moved makes a copy of.
        for name, weight in weights.items():
            self._places[name].data = weight

    def _compare(self, facts: Facts, whose: str) -> None:
        other = {name for name in facts.keys() | self._facts if _differ(name, facts, self._facts)}
        if other:
            raise refused(
                self._config,
                f"{whose} and '{self._config.instance}' disagree about {shown(sorted(other))}",
            )

    def _ended(self, part: Sharer) -> None:
        with self.lock:
            if self._part is part:
                self._let_go(part)
                log.info(
                    "model '%s': '%s' has let go of the weights: '%s', who owned them, has ended.",
                    self._config.name,
                    self._config.instance,
                    part.document["instance"],
                )

    def _let_go(self, part: Sharer) -> None:
        """Unmap the memory: it may be another's soon, and must not be computed with."""
        self._part = None
        if self._unplaced is None:
            for place in self._places.values():
                place.data = torch.empty(0, dtype=place.dtype, device=self._memory.device)
        part.leave()

    def _unavailable(self, problem: str, cure: str) -> UnavailableError:
        return UnavailableError(
            self._config.name,
            f"the instance that owned the weights has ended, and {problem}",
            cure=cure,
        )


def refused(config: ModelConfig, reason: str) -> ConfigError:
    """What the config is told that insists on sharing."""
    return ConfigError(
        config.name,
        f"ENABLE_WEIGHT_SHARING is true, and the weights cannot be shared: {reason}",
        cure='Set it to "false", or take it out.',
    )


# --- tensors ---------------------------------------------------------------------------------


def named(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each under all of its names."""
    return dict(
        itertools.chain(
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        )
    )


def _facts(weights: Weights) -> Facts:
    """What two processes must agree in: type and size; of a tied tensor, its first name."""
    first: dict[int, str] = {}
    return {
        name: [str(one.dtype), list(one.shape), first.setdefault(id(one), name)]
        for name, one in weights.items()
    }


def _differ(name: str, some: Facts, others: Facts) -> bool:
    return some.get(name) != others.get(name)


def _offered(weights: Weights, memory: Memory) -> dict[str, Any]:
    """Where they are, as JSON."""
    blocks: dict[str, int] = {}
    tensors = {}
    for name, one in weights.items():
        if one.device != memory.device or one.layout is not torch.strided:
            raise NotShared(f"{name} is a tensor of layout {one.layout} on {one.device}")
        block, at = memory.export(one) if one.numel() else ("", 0)
        tensors[name] = {
            "block": blocks.setdefault(block, len(blocks)),
            "at": at,
            "dtype": str(one.dtype).removeprefix("torch."),
            "size": list(one.shape),
            "stride": list(one.stride()),
        }
    return {"blocks": list(blocks), "tensors": tensors}


def _views(offered: Mapping[str, Any], memory: Memory) -> dict[str, Tensor]:
    blocks = [memory.open(block) if block else None for block in offered["blocks"]]
    return {
        name: _view(blocks[one["block"]], one, memory.device)
        for name, one in offered["tensors"].items()
    }


def _view(block: Tensor | None, one: Mapping[str, Any], device: torch.device) -> Tensor:
    dtype = getattr(torch, one["dtype"])
    if block is None:  # without an element, it has no memory
        return torch.empty_strided(one["size"], one["stride"], dtype=dtype, device=device)
    view = torch.empty(0, dtype=dtype, device=device)
    return view.set_(
        block.untyped_storage(), one["at"] // dtype.itemsize, one["size"], one["stride"]
    )


def _move(module: nn.Module, weights: Weights, device: torch.device) -> None:
    """Move a module to a device, where what is given takes the place of what it has."""
    places = named(module)
    instead = {id(place): weights[name] for name, place in places.items() if name in weights}

    def moved(tensor: Tensor) -> Tensor:
        given = instead.get(id(tensor))
        return tensor.to(device) if given is None else given

    module._apply(moved)  # noqa: SLF001  what to() itself is made of
