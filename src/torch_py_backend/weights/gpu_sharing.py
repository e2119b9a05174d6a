"""One copy of the weights on a GPU for all instances of a server: one owns it, the others map it.

The owner loads the model as a single instance would, and offers its parameters and buffers by name:
the allocation, offset, dtype, size and strides of each. The other instances build the module and
replace its tensors with views of the mapped memory.

When the owner closes or dies, the others unmap the memory. At their next batch they elect another
owner, which loads the weights again. A batch during which the owner died is answered with an error,
because its results may be wrong.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TypeAlias, TypedDict

import torch
from torch import Tensor, nn

from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.compile import torch_compile
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError, UnavailableError, join_names
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.processes import server_folder
from torch_py_backend.weights import owner_election
from torch_py_backend.weights.cuda_ipc import CudaMemory, NotShared
from torch_py_backend.weights.owner_election import Owner, Sharer

log = logging.getLogger(__name__)

Weights: TypeAlias = "Mapping[str, Tensor]"
# What must be equal in two processes, by name: dtype, size, and the first name of a tied tensor.
Facts: TypeAlias = "Mapping[str, list[object]]"
# Options that determine the tensors and their values.
_OPTIONS = ("model_class", "model_factory", "model_kwargs", "weights", "optimize")


class _Placed(TypedDict):
    """The memory of one tensor: the index of its block, and the offset in it in bytes."""

    block: int
    at: int
    dtype: str
    size: list[int]
    stride: list[int]


class _Offer(TypedDict):
    """The weights of an owner, as JSON."""

    instance: str
    facts: Facts
    blocks: list[str]
    tensors: dict[str, _Placed]


def requested(config: ModelConfig) -> bool:
    """Return whether the config asks for sharing weights on a GPU."""
    return config.kind != "CPU" and bool(config.options.enable_weight_sharing)


def refusal(config: ModelConfig) -> str:
    """Return why the weights of a model on a GPU cannot be shared; empty: they can."""
    if config.kind == "MODEL":
        return "the instance is KIND_MODEL: the model places itself"
    if config.options.freezes:
        return "freezing makes them constants of each instance's own graph"
    return ""


def key(config: ModelConfig, artifact: Artifact, device: str) -> str:
    """Return a hash that is equal for instances with the same files and tensor options."""
    facts = {
        "files": [
            (str(path.resolve()), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            for path in artifact.files()
            for stat in [path.stat()]
        ],
        "options": {name: repr(getattr(config.options, name)) for name in _OPTIONS},
        "torch": torch.__version__,
        "device": device,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# --- one instance ----------------------------------------------------------------------------


class SharedWeights:
    """The weights of one instance, shared with the others: it owns them, or waits for an offer.

    Args:
        device: the GPU; None: the model places itself.
        reload: reloads the module from its files, onto the GPU.

    Attributes:
        lock: held while the weights are used or replaced.
        final: whether compiled code or CUDA graphs contain the addresses of the weights, so that
            the memory cannot be replaced.

    Raises:
        ConfigError: the weights cannot be shared.
        PlatformError: the server's folder cannot be used.
    """

    def __init__(
        self,
        config: ModelConfig,
        artifact: Artifact,
        device: torch.device | None,
        reload: Callable[[], nn.Module | None],
    ) -> None:
        reason = refusal(config)
        if reason or device is None:
            raise not_shared_error(config, reason)
        self.lock = threading.RLock()
        self.final = "cuda_graphs" in config.options.optimize or torch_compile.requested(config)
        self._config = config
        self._memory = CudaMemory(device)
        self._reload = reload
        self._unplaced: nn.Module | None = None
        self._weights: Weights = {}
        self._facts: Facts = {}
        digest = key(config, artifact, self._memory.name())
        self._server_folder = server_folder.enter(config.name)
        try:
            self._folder = self._server_folder.folder(f"weights-{digest[:32]}")
            self._role: Owner | Sharer | None = owner_election.join(self._folder, config.instance)
        except BaseException:
            self._server_folder.leave()
            raise

    @property
    def owns(self) -> bool:
        """Whether this instance owns the weights, and so must load them onto the device."""
        return isinstance(self._role, Owner)

    @property
    def present(self) -> bool:
        """Whether the module has its weights."""
        return self._role is not None

    def share(self, loaded: Loaded) -> None:
        """Share the weights of a model from now on; those of a sharer may still be on the CPU.

        Raises:
            ConfigError: the weights cannot be shared.
        """
        module = loaded.owner
        weights = {} if module is None else named(module)
        reason = refusal(self._config)
        if loaded.kind is ArtifactType.AOTI:
            reason = "the AOTInductor package contains them"
        if reason or not weights:
            raise not_shared_error(self._config, reason or "the model exposes none")
        with self.lock:
            self._unplaced, self._weights = module, weights
            self._facts = _facts(self._weights)
            self._attach()
            self._recover()

    def ready(self) -> UnavailableError | None:
        """Map or load the weights if they are missing; return the error if that fails.

        Call it before the weights are used, and hold the lock.
        """
        if self._role is not None:
            return None
        if self.final:
            return self._unavailable(
                "its compiled code contains their addresses", "Load the model again."
            )
        try:
            with torch.inference_mode(mode=False):
                self._recover()
        except Exception:  # missing files or memory; the next batch tries again
            log.exception("model '%s': its weights cannot be loaded again", self._config.name)
            return self._unavailable("they cannot be loaded again", "See the server's log.")
        return None

    def lost(self) -> UnavailableError | None:
        """Return an error if the owner died while the weights were used.

        Call it after the weights were used, and hold the lock.
        """
        role = self._role
        if not isinstance(role, Sharer) or role.alive():
            return None
        self._unmap(role)
        return self._unavailable("this batch was computed meanwhile", "Send it again.")

    def close(self) -> None:
        """Stop sharing; an owner waits for the sharers. A second call does nothing."""
        with self.lock:
            role = self._role
            if isinstance(role, Sharer):
                self._unmap(role)
            self._role, self.final = None, True
        if isinstance(role, Owner):
            role.close()
        self._server_folder.leave()

    # --- exchange ---

    def _recover(self) -> None:
        while self._role is None:
            self._role = owner_election.join(self._folder, self._config.instance)
            self._attach()

    def _attach(self) -> None:
        """Load or map the weights; the role is None afterwards if the owner has ended."""
        role = self._role
        try:
            if isinstance(role, Owner):
                self._offer(role)
            elif role is not None and not self._map(role):
                self._unmap(role)
        except BaseException:
            self._role = None
            if role is not None:
                role.close()
            raise

    def _offer(self, owner: Owner) -> None:
        weights: Weights = {}
        if self._unplaced is None:
            module = self._reload()
            weights = {} if module is None else named(module)
            self._compare(_facts(weights), "their files")
        self._place(weights)
        self._memory.synchronize()
        try:
            blocks, tensors = _export(self._weights, self._memory)
        except NotShared as error:
            raise not_shared_error(self._config, str(error)) from error
        owner.offer(
            _Offer(
                instance=self._config.instance, facts=self._facts, blocks=blocks, tensors=tensors
            )
        )
        log.info("model '%s': '%s' owns the weights.", self._config.name, self._config.instance)

    def _map(self, sharer: Sharer) -> bool:
        """Map the offered weights, and return whether the owner is still alive."""
        offer: _Offer = sharer.document
        self._compare(offer["facts"], f"'{offer['instance']}'")
        try:
            self._place(_views(offer, self._memory))
        except NotShared as error:
            if sharer.alive():
                raise not_shared_error(self._config, str(error)) from error
            return False
        self._memory.synchronize()
        self._memory.empty_cache()
        if not sharer.alive():
            return False
        sharer.watch(lambda: self._owner_ended(sharer))
        log.info(
            "model '%s': '%s' maps the weights of '%s'.",
            self._config.name,
            self._config.instance,
            offer["instance"],
        )
        return True

    def _place(self, weights: Weights) -> None:
        """Give the module these weights, and move it to the device if it is not there yet."""
        if self._unplaced is not None:
            tensors = named(self._unplaced).items()
            replacements = {
                id(tensor): weights[name] for name, tensor in tensors if name in weights
            }
            device = self._memory.device
            # As Module.to() does it.
            self._unplaced._apply(  # noqa: SLF001
                lambda tensor: (
                    replacements[id(tensor)] if id(tensor) in replacements else tensor.to(device)
                )
            )
            self._weights, self._unplaced = named(self._unplaced), None
        # This sets the weights of later calls, and those of RNNs: moving an RNN copies them.
        for name, weight in weights.items():
            self._weights[name].data = weight

    def _compare(self, facts: Facts, source: str) -> None:
        differing = {
            name for name in facts.keys() | self._facts if facts.get(name) != self._facts.get(name)
        }
        if differing:
            raise not_shared_error(
                self._config,
                f"{source} and '{self._config.instance}' disagree about"
                f" {join_names(sorted(differing))}",
            )

    def _owner_ended(self, sharer: Sharer) -> None:
        with self.lock:
            if self._role is sharer:
                self._unmap(sharer)
                log.info(
                    "model '%s': '%s' has unmapped the weights: their owner, '%s', has ended.",
                    self._config.name,
                    self._config.instance,
                    sharer.document["instance"],
                )

    def _unmap(self, sharer: Sharer) -> None:
        """Unmap the memory, which may be allocated to another process next."""
        self._role = None
        if self._unplaced is None:
            for weight in self._weights.values():
                weight.data = torch.empty(0, dtype=weight.dtype, device=self._memory.device)
        sharer.close()

    def _unavailable(self, problem: str, cure: str) -> UnavailableError:
        return UnavailableError(
            self._config.name,
            f"the instance that owned the weights has ended, and {problem}",
            cure=cure,
        )


def not_shared_error(config: ModelConfig, reason: str) -> ConfigError:
    """Return the error for ENABLE_WEIGHT_SHARING where the weights cannot be shared."""
    return ConfigError(
        config.name,
        f"ENABLE_WEIGHT_SHARING is true, and the weights cannot be shared: {reason}",
        cure='Set it to "false", or remove it.',
    )


# --- tensors ---------------------------------------------------------------------------------


def named(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers, each under all of its names."""
    return dict(
        itertools.chain(
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        )
    )


def _facts(weights: Weights) -> Facts:
    first: dict[int, str] = {}
    return {
        name: [str(weight.dtype), list(weight.shape), first.setdefault(id(weight), name)]
        for name, weight in weights.items()
    }


def _export(weights: Weights, memory: CudaMemory) -> tuple[list[str], dict[str, _Placed]]:
    """Return the blocks of memory of the weights, and the place of each weight."""
    blocks: dict[str, int] = {}
    tensors: dict[str, _Placed] = {}
    for name, weight in weights.items():
        if weight.device != memory.device or weight.layout is not torch.strided:
            raise NotShared(f"{name} is a tensor of layout {weight.layout} on {weight.device}")
        block, offset = memory.export(weight) if weight.numel() else ("", 0)
        tensors[name] = {
            "block": blocks.setdefault(block, len(blocks)),
            "at": offset,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "size": list(weight.shape),
            "stride": list(weight.stride()),
        }
    return list(blocks), tensors


def _views(offer: _Offer, memory: CudaMemory) -> dict[str, Tensor]:
    """Map the memory of an offer, and return the weights."""
    blocks = [memory.open(block) if block else None for block in offer["blocks"]]
    views = {}
    for name, tensor in offer["tensors"].items():
        dtype, size, stride = getattr(torch, tensor["dtype"]), tensor["size"], tensor["stride"]
        block = blocks[tensor["block"]]
        if block is None:  # a tensor without elements has no memory
            views[name] = torch.empty_strided(size, stride, dtype=dtype, device=memory.device)
        else:
            offset = tensor["at"] // dtype.itemsize
            view = torch.empty(0, dtype=dtype, device=memory.device)
            views[name] = view.set_(block.untyped_storage(), offset, size, stride)
    return views
