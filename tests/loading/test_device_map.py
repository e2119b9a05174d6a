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
from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.errors import ConfigError, LoadError, PlatformError
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
        for name, one in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(change(one), requires_grad=False))
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


_SPLIT = {"start": "cuda:0", "blocks.0": "cuda:0", "blocks.1": "cuda:1", "head": "cpu"}


@pytest.mark.usefixtures("gpus")
def test_devices_of_weights() -> None:
    """Parameters and buffers, also non-persistent ones, follow the longest matching name."""
    net = spread({"": "cuda:1", "blocks": "cuda:0", "blocks.1.inner": "cpu"})
    found = {name: str(one.device) for name, one in (*net.named_parameters(), *net.named_buffers())}
    assert found == {
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
    "wished",
    [
        _SPLIT,
        {"": "cuda:0"},
        {"": "cpu"},
        {"": "cuda:0", "head": "cuda:1"},
        {"": "cpu", "blocks": "cuda:0", "head": "cuda:1"},
        {"": "cpu", "blocks": "cuda:1", "blocks.1.inner": "cuda:0"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("gpus")
def test_tensors_follow(wished: dict[str, str]) -> None:
    """Inputs are moved to each submodule's device, and the result to that of the first weight."""
    net = spread(wished)
    config = build.config(kind="MODEL", device_map=wished)
    home = net.start.device
    made = Dispatched(net, net, config)(torch.zeros(3, 4))
    assert (made.device, made.shape) == (home, (3, 2))


@pytest.mark.usefixtures("gpus")
def test_without_hooks() -> None:
    """Without hooks, an operation on two devices fails."""
    net = Net()
    net.head.to("cuda:1")
    with pytest.raises(RuntimeError, match=r"cpu|cuda:1"):
        net(torch.zeros(3, 4))


@pytest.mark.usefixtures("gpus")
def test_result_of_a_submodule() -> None:
    """The result of a submodule is moved to the device of its caller."""
    wished = {"": "cuda:0", "blocks": "cuda:1"}
    net = spread(wished)
    config = build.config(kind="MODEL", device_map=wished)
    assert str(Dispatched(net.summed, net, config)(torch.zeros(3, 4)).device) == "cuda:0"


def test_values_are_the_same() -> None:
    """A device map does not change results."""
    net = Net().requires_grad_(requires_grad=False)
    x = torch.rand(3, 4)
    before = net(x)
    spread({"": "cpu", "head": "cpu"}, net)
    home = Dispatched(net, net, build.config(kind="MODEL", device_map={"": "cpu"}))
    assert torch.equal(home(x), before)


def test_hooks_see_the_module() -> None:
    """Attributes are those of the module."""
    net = spread({"": "cpu"})
    home = Dispatched(net, net, build.config(kind="MODEL", device_map={"": "cpu"}))
    assert home.head is net.head
    with pytest.raises(AttributeError, match="tail"):
        home.tail  # noqa: B018


def test_only_borders_are_hooked() -> None:
    """Submodules on the device of their caller have no hooks."""
    net = spread({"": "cpu", "blocks": "cpu", "blocks.1.inner": "cpu"})
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in net.modules())


def test_tied_weights_stay_tied() -> None:
    """Tied weights are one tensor afterwards."""
    net = spread({"": "cpu", "blocks.0": "cpu"}, _tied())
    assert net.blocks[1].inner.weight is net.blocks[0].inner.weight


def _tied() -> Net:
    net: Any = Net()
    net.blocks[1].inner.weight = net.blocks[0].inner.weight
    tied: Net = net
    return tied


@pytest.mark.parametrize(
    ("wished", "module", "kind", "says"),
    [
        pytest.param(
            {"": "cuda:7"},
            Net(),
            PlatformError,
            "DEVICE_MAP puts '' on cuda:7, and torch .* sees 2 GPUs",
            id="device",
        ),
        pytest.param(
            {"": "cpu", "tail": "cpu"},
            Net(),
            ConfigError,
            "names tail, and Net has no such part; expected modules or weights of it, such as"
            " blocks, head",
            id="module",
        ),
        pytest.param(
            {"blocks": "cpu"},
            Net(),
            ConfigError,
            "has no device for 3 weights: start, head.weight, head.bias",
            id="uncovered",
        ),
        pytest.param(
            {"": "cpu", "blocks.1": "cuda:0"},
            _tied(),
            ConfigError,
            "puts blocks.0.inner.weight on cpu and blocks.1.inner.weight on cuda:0, and they are"
            " one tensor",
            id="tied",
        ),
    ],
)
def test_wrong_map(
    wished: dict[str, str],
    module: nn.Module,
    kind: type[LoadError],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong map is refused before anything is moved."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(kind, match=says):
        spread(wished, module)
    assert {one.device.type for one in module.parameters()} == {"cpu"}


# --- files -----------------------------------------------------------------------------------


def test_a_map_in_a_file(tmp_path: Path) -> None:
    """The map may be a file; numbers are ordinals of GPUs."""
    build.write(tmp_path, "devices.json", '{"": "cpu", "head": 1, "blocks": "cuda"}')
    config = build.config(tmp_path, kind="MODEL", device_map="devices.json")
    assert device_map._read_map(config) == {"": "cpu", "head": "cuda:1", "blocks": "cuda:0"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        ("{", "JSONDecodeError"),
        ("[]", "expected a JSON object"),
        ("{}", "expected a JSON object"),
        ('{"": "disk"}', "expected a JSON object"),
        ('{"": "cpu", "": "cuda"}', "expected a JSON object from each module once"),
        ("\xff", "expected a JSON object"),
    ],
)
def test_wrong_file(content: str | None, says: str, tmp_path: Path) -> None:
    """The error names the file and the expected content."""
    if content is not None:
        build.write(tmp_path, "devices.json", content.encode("latin-1"))
    config = build.config(tmp_path, kind="MODEL", device_map="devices.json")
    with pytest.raises(ConfigError, match=says) as raised:
        device_map.dispatch(config, Net())
    assert "DEVICE_MAP is 'devices.json', which cannot be used" in str(raised.value)


@pytest.mark.parametrize("name", ["../../devices.json", "/etc/devices.json"])
def test_file_outside_of_the_model(name: str, tmp_path: Path) -> None:
    """The file must be in the model's folder."""
    config = build.config(tmp_path, kind="MODEL", device_map=name)
    with pytest.raises(ConfigError, match="expected a file in the model's own folder"):
        device_map.dispatch(config, Net())


def test_new_weights(tmp_path: Path) -> None:
    """New weights replace the old ones on their devices."""
    config, artifact, _ = stored(tmp_path, 0.0)
    loaded = registry.load(artifact, config, None)
    fresh = stored(tmp_path, 1.0)[2]
    weight_swap.swap(config, artifact, loaded, weight_swap.read(config, artifact, loaded))
    x = torch.rand(3, 4)
    with torch.no_grad():
        assert torch.equal(loaded.module(x), fresh(x))


def stored(folder: Path, start: float) -> tuple[Any, Artifact, Net]:
    net = Net()
    nn.init.constant_(net.start, start)
    build.write(folder, "model.py", models.source(Block, Net))
    torch.save(net.state_dict(), folder / "1" / "new.pt")
    (folder / "1" / "new.pt").rename(folder / "1" / "model.pt")
    config = build.config(
        folder, kind="MODEL", device_map={"": "cpu"}, watch_weights=True, model_class="Net"
    )
    return config, discovery.find(config), net
