"""DEVICE_MAP: the parts of one module on devices of their own.

Weights go from their file to their devices; tensors follow where one part calls another.
accelerate's `dispatch_model` does as much, and wraps forward() of every layer. This is on the way
of every call: here only the borders between devices have a hook.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_py_backend.artifacts import discovery
from torch_py_backend.batching import trees
from torch_py_backend.config import options
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError, PlatformError, brief, shown

# What a module has that is never called, as a ModuleList.
_NO_FORWARD = nn.Module.forward


def spread(config: ModelConfig, module: nn.Module) -> None:
    """Put the parts of a module where the map wants them, and let tensors follow.

    Raises:
        ConfigError: the map does not fit the module.
        PlatformError: this process does not see one of its devices.
    """
    chosen = _wished(config)
    _refuse_missing(config, chosen)
    places = _places(config, module, chosen)
    # As Module.to() does it, layer by layer: never is all of it on one device.
    module._apply(lambda one: one.to(places[id(one)]) if id(one) in places else one)
    for part, inside, outside in _borders(module, chosen):
        part.register_forward_pre_hook(_entering(inside), with_kwargs=True)
        if outside is not None:
            part.register_forward_hook(_leaving(outside))


class Home:
    """What is called with the inputs, whose results come back to where inputs go.

    Args:
        called: the module, or one of its methods.
        owner: the module.
        config: its config.
    """

    def __init__(self, called: Callable[..., Any], owner: nn.Module, config: ModelConfig) -> None:
        rest = _wished(config).get("")
        first = next(itertools.chain(owner.parameters(), owner.buffers()), None)
        self._called = called
        self._owner = owner
        self._home = torch.device("cpu") if first is None else first.device
        self._begin = self._home if rest is None else torch.device(rest)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it where its own code is to run."""
        given, named = trees.sent((args, kwargs), self._begin)
        return trees.sent(self._called(*given, **named), self._home)

    def __getattr__(self, name: str) -> Any:
        """What hooks want to know of the module."""
        return getattr(self.__dict__["_owner"], name)


def _wished(config: ModelConfig) -> Mapping[str, str]:
    wished = config.options.device_map
    if not isinstance(wished, str):
        return wished or {}
    discovery.refuse_outside(config, "DEVICE_MAP", wished)
    try:
        return options.devices((config.version_folder / wished).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            config.name,
            f"DEVICE_MAP is '{wished}', which cannot be used: {brief(error)}",
            expected=f"a JSON object from each module once to its device ({options.DEVICES})",
        ) from error


def _refuse_missing(config: ModelConfig, chosen: Mapping[str, str]) -> None:
    seen = torch.cuda.device_count()  # 0, where this torch has no CUDA
    for name, device in chosen.items():
        index = torch.device(device).index
        if index is not None and index >= seen:
            raise PlatformError(
                config.name,
                f"DEVICE_MAP puts '{name}' on {device}, and torch {torch.__version__} sees {seen}"
                " GPUs",
                cure="Correct the map, or install a torch built for this machine's CUDA driver.",
            )


def _places(
    config: ModelConfig, module: nn.Module, chosen: Mapping[str, str]
) -> dict[int, torch.device]:
    """Where each weight goes, by its identity."""
    weights = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    known = {name for name, _ in (*module.named_modules(remove_duplicate=False), *weights)}
    unknown = [name for name in chosen if name not in known]
    if unknown:
        children = shown(name for name, _ in module.named_children())
        raise ConfigError(
            config.name,
            f"DEVICE_MAP names {shown(unknown)}, and {type(module).__name__} has no such part",
            expected=f"modules or weights of it, such as {children}",
        )
    uncovered = [name for name, _ in weights if _device(chosen, name) is None]
    if uncovered:
        raise ConfigError(
            config.name,
            f"DEVICE_MAP says nothing of {len(uncovered)} weights: {shown(uncovered)}",
            cure='Add their modules, or "" for all the rest.',
        )
    return _agreed(config, chosen, weights)


def _agreed(
    config: ModelConfig, chosen: Mapping[str, str], weights: list[tuple[str, Tensor]]
) -> dict[int, torch.device]:
    """Tied weights are one tensor, which is on one device."""
    names: dict[int, str] = {}
    places: dict[int, torch.device] = {}
    for name, tensor in weights:
        device = torch.device(_device(chosen, name) or "cpu")
        first = names.setdefault(id(tensor), name)
        if places.setdefault(id(tensor), device) != device:
            raise ConfigError(
                config.name,
                f"DEVICE_MAP puts {first} on {places[id(tensor)]} and {name} on {device}, and they"
                " are one tensor",
                cure="Put the modules that share it on one device.",
            )
    return places


def _device(chosen: Mapping[str, str], name: str) -> str | None:
    """What the longest name says that is a beginning of this one."""
    words = name.split(".")
    for length in range(len(words), 0, -1):
        found = chosen.get(".".join(words[:length]))
        if found is not None:
            return found
    return chosen.get("")


def _borders(
    module: nn.Module, chosen: Mapping[str, str]
) -> Iterator[tuple[nn.Module, torch.device, torch.device | None]]:
    """Parts on another device than what calls them: the part, its device, and the caller's."""
    for name, part in module.named_modules():
        inside = _device(chosen, name)
        if not name or inside is None or type(part).forward is _NO_FORWARD:
            continue
        outside = _device(chosen, _caller(module, name))
        if outside is None:
            yield part, torch.device(inside), None
        elif outside != inside:
            yield part, torch.device(inside), torch.device(outside)


def _caller(module: nn.Module, name: str) -> str:
    """The nearest module around another that has a forward()."""
    while name:
        name = name.rpartition(".")[0]
        if type(module.get_submodule(name)).forward is not _NO_FORWARD:
            break
    return name


def _entering(device: torch.device) -> Callable[..., Any]:
    def move(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return trees.sent((args, kwargs), device)

    return move


def _leaving(device: torch.device) -> Callable[..., Any]:
    def move(_: nn.Module, __: tuple[Any, ...], result: Any) -> Any:
        return trees.sent(result, device)

    return move
