"""DEVICE_MAP: the submodules of one module on several devices.

accelerate's `dispatch_model` does the same and wraps forward() of every layer, which each call
runs through. Here only submodules at the border between two devices have a hook.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torch_py_backend.artifacts import discovery
from torch_py_backend.batching import trees
from torch_py_backend.config import options
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError, PlatformError, join_names, summarize
from torch_py_backend.loading.loaded import NO_FORWARD, Forward


def dispatch(config: ModelConfig, module: nn.Module) -> None:
    """Move the submodules to the devices of the map, and add hooks that move their inputs.

    Raises:
        ConfigError: the map does not fit the module.
        PlatformError: this process does not see one of the devices.
    """
    device_map = read_map(config)
    count = torch.cuda.device_count()  # 0 if this torch has no CUDA
    for name, device in device_map.items():
        index = torch.device(device).index
        if index is not None and index >= count:
            raise PlatformError(
                config.name,
                f"DEVICE_MAP puts '{name}' on {device}, and torch {torch.__version__} sees {count}"
                " GPUs",
                cure="Correct the map, or install a torch built for this machine's CUDA driver.",
            )
    devices = _weight_devices(config, module, device_map)
    # As Module.to() does it, one layer at a time: no device needs memory for the whole module.
    module._apply(lambda tensor: tensor.to(devices.get(id(tensor), tensor.device)))
    for border in _borders(module, device_map):
        _add_hooks(*border)


def _add_hooks(module: nn.Module, device: torch.device, caller_device: torch.device | None) -> None:
    """Move the inputs of a module to its device, and its result to that of its caller."""
    module.register_forward_pre_hook(
        lambda _, args, kwargs: trees.to_device((args, kwargs), device), with_kwargs=True
    )
    if caller_device is not None:
        module.register_forward_hook(lambda _, __, result: trees.to_device(result, caller_device))


class Dispatched:
    """Moves inputs to the module's device, and results to that of its first weight."""

    def __init__(self, call: Forward, owner: nn.Module, config: ModelConfig) -> None:
        default = read_map(config).get("")
        first = next(itertools.chain(owner.parameters(), owner.buffers()), None)
        self._call = call
        self._owner = owner
        self._output_device = torch.device("cpu") if first is None else first.device
        self._input_device = self._output_device if default is None else torch.device(default)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        args, kwargs = trees.to_device((args, kwargs), self._input_device)
        return trees.to_device(self._call(*args, **kwargs), self._output_device)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module, for hooks."""
        return getattr(self.__dict__["_owner"], name)


def read_map(config: ModelConfig) -> Mapping[str, str]:
    """Return the device of each named submodule and weight, from the config or its file."""
    value = config.options.device_map
    if not isinstance(value, str):
        return value or {}
    discovery.check_inside(config, "DEVICE_MAP", value)
    try:
        return options.parse_device_map((config.version_folder / value).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            config.name,
            f"DEVICE_MAP is '{value}', which cannot be used: {summarize(error)}",
            expected=f"a JSON object from each module once to its device ({options.DEVICES})",
        ) from error


def _weight_devices(
    config: ModelConfig, module: nn.Module, device_map: Mapping[str, str]
) -> dict[int, torch.device]:
    """Return the device of each weight, by its identity."""
    weights = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    names = {name for name, _ in (*module.named_modules(remove_duplicate=False), *weights)}
    unknown = [name for name in device_map if name not in names]
    if unknown:
        children = join_names(name for name, _ in module.named_children())
        raise ConfigError(
            config.name,
            f"DEVICE_MAP names {join_names(unknown)}, and {type(module).__name__} has no such part",
            expected=f"modules or weights of it, such as {children}",
        )
    uncovered = [name for name, _ in weights if _device(device_map, name) is None]
    if uncovered:
        raise ConfigError(
            config.name,
            f"DEVICE_MAP has no device for {len(uncovered)} weights: {join_names(uncovered)}",
            cure='Add their modules, or "" for all the rest.',
        )
    first_names: dict[int, str] = {}
    devices: dict[int, torch.device] = {}
    for name, tensor in weights:
        device = torch.device(_device(device_map, name) or "cpu")
        first = first_names.setdefault(id(tensor), name)
        if devices.setdefault(id(tensor), device) != device:
            raise ConfigError(
                config.name,
                f"DEVICE_MAP puts {first} on {devices[id(tensor)]} and {name} on {device}, and they"
                " are one tensor",
                cure="Put the modules that share it on one device.",
            )
    return devices


def _device(device_map: Mapping[str, str], name: str) -> str | None:
    """Return the device of the longest prefix of a name that is in the map."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        device = device_map.get(".".join(parts[:length]))
        if device is not None:
            return device
    return device_map.get("")


def _borders(
    module: nn.Module, device_map: Mapping[str, str]
) -> Iterator[tuple[nn.Module, torch.device, torch.device | None]]:
    """Yield submodules on another device than their caller, with their device and the caller's."""
    for name, submodule in module.named_modules():
        device = _device(device_map, name)
        if not name or device is None or type(submodule).forward is NO_FORWARD:
            continue
        # The caller is the nearest enclosing module that has a forward().
        caller = name.rpartition(".")[0]
        while caller and type(module.get_submodule(caller)).forward is NO_FORWARD:
            caller = caller.rpartition(".")[0]
        caller_device = _device(device_map, caller)
        if caller_device != device:
            target = None if caller_device is None else torch.device(caller_device)
            yield submodule, torch.device(device), target
