"""What instances share of a model's weights: pages of mapped files, or one copy on a GPU.

On a GPU, the first instance loads the model and offers its weights on a socket. The others build
the module, and get these tensors through torch.multiprocessing's reductions: CUDA IPC handles. When
the owner ends, its memory is gone: the others refuse requests until the model is loaded again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from multiprocessing.connection import Client, Listener
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # registers how tensors are sent to other processes
from torch import Tensor, nn

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError, summarize
from torch_py_backend.loading.discovery import ArtifactType
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.loading.weights import Mapped, measure
from torch_py_backend.processes import private_files, procfs


def mapped(config: ModelConfig, loaded: Loaded) -> Mapped:
    """Return which weights are in mapped files; ConfigError if some are not, and have to be."""
    owner = loaded.owner
    weights = measure([] if owner is None else owner.state_dict(keep_vars=True).values())
    is_copied = loaded.kind is ArtifactType.AOTI or config.options.freezes
    is_shared = not is_copied and (requested(config) or weights.shared == weights.total)
    if config.options.enable_weight_sharing and not is_shared:
        raise not_shared_error(
            f"{weights} are in mapped files. That takes an uncompressed file whose values neither"
            " the module nor OPTIMIZE nor freezing converts"
        )
    return weights


def requested(config: ModelConfig) -> bool:
    """Return whether the config asks for sharing weights on a GPU."""
    return config.kind == "GPU" and bool(config.options.enable_weight_sharing)


def not_shared_error(reason: str) -> ConfigError:
    return ConfigError(
        f"ENABLE_WEIGHT_SHARING is true, and the weights cannot be shared: {reason}",
        cure='Set it to "false", or remove it.',
    )


class SharedWeights:
    """The weights of one instance, shared with the others of its model on the same GPU.

    Create and `share` it in the model's turn (`private_files.turn`): then an owner that has begun
    has also made its offer. If it `owns` them, the instance must load the weights onto the device.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._instance, self._device = config.instance, device
        key = f"{config.version_folder.resolve()} {device}"
        self._socket = private_files.server_path(config.name, key)
        # An address has at most 107 characters, so the folder is named by a descriptor, kept open.
        folder = os.open(self._socket.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._address = f"/proc/self/fd/{folder}/{self._socket.name}"
        self._listener: Listener | None = None
        # The process ID of the owner, and the start of that process.
        self._owner = os.getpid(), procfs.start_time(os.getpid())
        self._weights: Mapping[str, Tensor] = {}
        self.owns = True
        # No instance owns the weights, or one of an earlier load does.
        with contextlib.suppress(OSError, EOFError), Client(self._address) as owner:
            owner.send(self._instance)
            # A process that the owner forked, before it ended, may keep the socket open.
            if owner.poll(timeout=60.0):
                self._owner, self._weights = owner.recv()
                self.owns = False

    def share(self, module: nn.Module | None) -> None:
        """Share the weights of a module from now on; those of a sharer may still be on the CPU."""
        if module is None:
            raise not_shared_error("the model exposes none")
        if not self.owns:
            for name, tensor in named(module).items():
                # In place, as Module.to() does it, which would copy the weights of RNNs once more.
                tensor.data = self._weights.get(name, tensor).to(self._device)
            torch.cuda.empty_cache()  # of the weights that a graph was loaded with
            return
        offered = {
            name: weight.detach()
            for name, weight in named(module).items()
            if weight.device == self._device
        }
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        try:
            ForkingPickler.dumps(offered)
        except Exception as error:  # such as memory that the driver does not export
            raise not_shared_error(summarize(error)) from error
        # Of an owner of an earlier load, or one that has ended.
        self._socket.unlink(missing_ok=True)
        self._listener = Listener(self._address)
        threading.Thread(
            target=self._serve, args=(self._listener, offered), name="weights", daemon=True
        ).start()

    def lost(self) -> bool:
        """Return whether the owner of the weights has ended."""
        return not self.owns and procfs.start_time(self._owner[0]) != self._owner[1]

    def close(self) -> None:
        """Withdraw the offer. May be called twice."""
        if self._listener is not None:
            with contextlib.suppress(FileNotFoundError):  # the owner of a later load removed it
                self._listener.close()

    def _serve(
        self,
        listener: Listener,
        offered: Mapping[str, Tensor],
    ) -> None:
        """Send the weights to each other instance of this load, as long as this process lives."""
        served = {self._instance}  # the next ones of these names belong to a later load
        with contextlib.suppress(OSError):  # the offer is withdrawn
            while True:
                sharer = listener.accept()
                with contextlib.suppress(OSError, EOFError), sharer:
                    name = sharer.recv()
                    if name not in served:
                        sharer.send((self._owner, offered))
                        served.add(name)


def named(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers, each under all of its names."""
    weights: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    weights.update(module.named_buffers(remove_duplicate=False))
    return weights
