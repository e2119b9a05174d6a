"""DEVICE_MAP: weights on their devices, tensors that follow. torch's fake tensors stand for GPUs'.

They compute nothing and have a device all the same; an operation on two devices fails as it does
on real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import build
import models
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_py_backend.artifacts import discovery
from torch_py_backend.errors import ConfigError
from torch_py_backend.loading import device_map, registry
from torch_py_backend.loading.device_map import Dispatched
from torch_py_backend.weights import weight_swap


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("offset", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        return {"y": self.inner(x) * scale + self.offset}


class Net(nn.Module):
    """Submodules in a list, called with keyword arguments, and a weight of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(4))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.start
        for block in self.blocks:
            x = block(x, scale=x)["y"]
        y: Tensor = self.head(x)
        return y

    def summed(self, x: Tensor) -> Tensor:
        """A method that computes with the result of a submodule."""
        y: Tensor = x + self.blocks[0](x, scale=x)["y"]
        return y


def _replaced(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Module._apply for fake tensors, which keep their device when they are changed in place."""
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(change(weight), requires_grad=False))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, change(buffer))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process with two GPUs, whose tensors have only shapes and devices."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(nn.Module, "_apply", _replaced)
    with FakeTensorMode(), torch.no_grad():
        yield


def spread(device_map_: dict[str, str], module: nn.Module | None = None) -> Any:
    module = Net() if module is None else module
    device_map.dispatch(build.config(kind="MODEL", device_map=device_map_), module)
    return module


@pytest.mark.usefixtures("gpus")
def test_devices_of_weights() -> None:
    """Parameters and buffers, also non-persistent ones, follow the longest matching name."""
    net = spread({"": "cuda:1", "blocks": "cuda:0", "blocks.1.inner": "cpu"})
    tensors = (*net.named_parameters(), *net.named_buffers())
    assert {name: str(tensor.device) for name, tensor in tensors} == {
        "start": "cuda:1",
        "blocks.0.inner.weight": "cuda:0",
        "blocks.0.inner.bias": "cuda:0",
        "blocks.0.offset": "cuda:0",
        "blocks.1.inner.weight": "cpu",
        "blocks.1.inner.bias": "cpu",
        "blocks.1.offset": "cuda:0",
        "head.weight": "cuda:1",
        "head.bias": "cuda:1",
    }


@pytest.mark.parametrize(
    "devices",
    [
        {"start": "cuda:0", "blocks.0": "cuda:0", "blocks.1": "cuda:1", "head": "cpu"},
        {"": "cpu", "blocks": "cuda:1", "blocks.1.inner": "cuda:0"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("gpus")
def test_tensors_follow(devices: dict[str, str]) -> None:
    """Inputs and results of submodules follow; the result is on the device of the first weight.

    Without hooks, an operation on two devices fails.
    """
    net = spread(devices)
    config = build.config(kind="MODEL", device_map=devices)
    for method, shape in ((net, (3, 2)), (net.summed, (3, 4))):
        result = Dispatched(method, net, config)(torch.zeros(3, 4))
        assert (result.device, result.shape) == (net.start.device, shape)
    plain = Net()
    plain.head.to("cuda:1")
    with pytest.raises(RuntimeError, match=r"cpu|cuda:1"):
        plain(torch.zeros(3, 4))


def test_values_are_the_same() -> None:
    """A device map does not change results or tied weights; attributes are those of the module."""
    net = _tied().requires_grad_(requires_grad=False)
    x = torch.rand(3, 4)
    before = net(x)
    spread({"": "cpu", "blocks": "cpu", "blocks.1.inner": "cpu"}, net)
    # All modules are on the device of their caller.
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in net.modules())
    dispatched = Dispatched(net, net, build.config(kind="MODEL", device_map={"": "cpu"}))
    assert torch.equal(dispatched(x), before)
    assert net.get_parameter("blocks.1.inner.weight") is net.get_parameter("blocks.0.inner.weight")
    assert dispatched.head is net.head
    with pytest.raises(AttributeError, match="tail"):
        dispatched.tail  # noqa: B018


def _tied() -> Net:
    net = Net()
    first, second = (net.get_submodule(f"blocks.{place}.inner") for place in (0, 1))
    second.weight = first.weight
    return net


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ({"blocks": "cpu"}, "has no device for 3 weights: start, head.weight, head.bias"),
        (
            {"": "cpu", "blocks.1": "cuda:0"},
            "puts blocks.0.inner.weight on cpu and blocks.1.inner.weight on cuda:0, and they are",
        ),
    ],
)
def test_wrong_map(devices: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong map is refused before anything is moved; see `device_map` in scenarios.py, too."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    module = _tied()
    with pytest.raises(ConfigError, match=message):
        spread(devices, module)
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


# --- files -----------------------------------------------------------------------------------


def test_a_map_in_a_file(tmp_path: Path) -> None:
    """The map may be a file; numbers are ordinals of GPUs."""
    build.write(tmp_path, "devices.json", '{"": "cpu", "head": 1, "blocks": "cuda"}')
    config = build.config(tmp_path, kind="MODEL", device_map="devices.json")
    assert device_map.read_map(config) == {"": "cpu", "head": "cuda:1", "blocks": "cuda:0"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "", "DEVICE_MAP is 'a.json', which cannot be used: JSONDecodeError"),
        ("a.json", '{"": "disk"}', "cannot be used: .*expected a JSON object from each module onc"),
        ("a.json", '{"": "cpu", "": "cuda"}', "expected a JSON object from each module once"),
        ("b.json", "", "DEVICE_MAP is 'b.json', which cannot be used: .*No such file"),
        ("../../a.json", "", "expected a file in the model's own folder"),
    ],
)
def test_wrong_file(name: str, content: str, message: str, tmp_path: Path) -> None:
    """The error names the file, which is in the model's folder, and the expected content."""
    build.write(tmp_path, "a.json", content.encode("latin-1"))
    config = build.config(tmp_path, kind="MODEL", device_map=name)
    with pytest.raises(ConfigError, match=message):
        device_map.dispatch(config, Net())


def test_new_weights(tmp_path: Path) -> None:
    """New weights replace the old ones on their devices."""
    devices = {"": "cpu"}
    build.write(tmp_path, "model.py", models.source(Block, Net))
    config = build.config(
        tmp_path, kind="MODEL", device_map=devices, watch_weights=True, model_class="Net"
    )
    path, net = tmp_path / "1" / "model.pt", Net()
    torch.save(net.state_dict(), path)
    loaded = registry.load(discovery.find(config), config, None)
    nn.init.constant_(net.start, 1.0)
    torch.save(net.state_dict(), path.with_name("new.pt"))
    path.with_name("new.pt").rename(path)
    weight_swap.swap(config, loaded, weight_swap.read(config, loaded))
    x = torch.rand(3, 4)
    with torch.no_grad():
        assert torch.equal(loaded.module(x), net(x))
