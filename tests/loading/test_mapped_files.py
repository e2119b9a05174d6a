from collections.abc import Callable
from pathlib import Path
from typing import Any

import build
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from torch_py_backend.loading import exported, weights
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.loading.weights import AliasOnCopy


def saved(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return tensors that are mapped from a file."""
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return weights.read(build.config(), path)


def shared(*tensors: Tensor) -> int:
    return weights.measure(tensors).shared


@pytest.fixture(params=["weights.pt", "weights.safetensors"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def test_loaded_parameter_is_the_same_object_in_the_memory_of_the_file(path: Path) -> None:
    state = saved(nn.Linear(5, 3).state_dict(), path)
    before = path.read_bytes()
    linear = nn.Linear(5, 3)
    weight = linear.weight
    with AliasOnCopy(state.values()):
        linear.load_state_dict(state)
    assert linear.weight is weight
    assert weight.requires_grad
    assert weight.data_ptr() == state["weight"].data_ptr()
    assert shared(weight, linear.bias) == weight.nbytes + linear.bias.nbytes
    # What a model writes stays in its process.
    values = weight.detach().clone()
    weight.detach().add_(7)
    assert path.read_bytes() == before
    assert torch.equal(weights.read(build.config(), path)["weight"], values)


_BASE = torch.zeros(8, 4)


@pytest.mark.parametrize(
    ("weight", "other"),
    [(torch.zeros(4, 4).double(), None), (torch.zeros(4, 4).t(), None), (_BASE[:4], _BASE)],
    ids=["dtype", "layout", "view"],
)
def test_weight_of_another_dtype_or_layout_or_with_a_view_is_copied(
    weight: Tensor, other: Tensor | None, path: Path
) -> None:
    values = torch.arange(16.0).reshape(4, 4)
    state = saved({"weight": values}, path)
    with AliasOnCopy(state.values()):
        weight.copy_(state["weight"])
    assert torch.equal(weight.float(), values)
    assert not shared(weight)
    if other is not None:
        assert torch.equal(other[:4], values)


def test_two_weights_of_one_record_stay_two(tmp_path: Path) -> None:
    value = torch.zeros(4)
    state = saved({"a": value, "b": value}, tmp_path / "weights.pt")
    first, second = torch.ones(4), torch.ones(4)
    with AliasOnCopy(state.values()):
        first.copy_(state["a"])
        second.copy_(state["b"])
        first.copy_(state["a"])
    first.add_(1)
    assert torch.equal(second, torch.zeros(4))


def test_computed_values_are_copied(path: Path) -> None:
    state = saved({"weight": torch.ones(4)}, path)
    weight, computed = torch.zeros(4), state["weight"] * 2
    with AliasOnCopy(state.values()):
        weight.copy_(computed)
    computed.zero_()
    assert torch.equal(weight, torch.full((4,), 2.0))


def test_part_of_a_tensor_is_mapped(path: Path) -> None:
    state = saved({"qkv": torch.arange(24.0).reshape(6, 4)}, path)
    parts = [torch.zeros(2, 4) for _ in range(3)]
    with AliasOnCopy(state.values()):
        for part, piece in zip(parts, state["qkv"].chunk(3), strict=True):
            part.copy_(piece)
    assert torch.equal(torch.cat(parts), state["qkv"])
    assert shared(*parts) == 24 * 4
    assert all(weights.has_no_other_views(part) for part in parts)


class Net(nn.Module):
    """Weights of equal sizes and values, a buffer, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 6, bias=False)
        self.third.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)
        self.table: Tensor
        self.register_buffer("table", torch.arange(6.0))
        nn.init.zeros_(self.first.bias)
        nn.init.zeros_(self.second.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.third(self.second(self.first(x))))
        result: Tensor = hidden + self.table
        return result


def scripted(net: Net, path: Path) -> Any:
    torch.jit.save(torch.jit.script(net), path)
    loaded = torch.jit.load(path)
    weights.share(loaded.state_dict(keep_vars=True).values(), path)
    return loaded


def save_program(net: Net, path: Path) -> Any:
    torch.export.save(torch.export.export(net, (torch.ones(2, 6),)), path)
    artifact = Artifact(ArtifactType.EXPORTED, path)
    return exported.load(artifact, build.config(max_batch_size=0), None).module


@pytest.mark.parametrize("make", [scripted, save_program])
def test_weights_of_an_archive_are_mapped_and_writes_stay_in_the_process(
    make: Callable[[Net, Path], Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net: Any = Net().eval()
    path, x = tmp_path / "model.pt", torch.rand(2, 6)
    model = make(net, path)
    before = path.read_bytes()
    mapped = weights.measure(model.state_dict(keep_vars=True).values())
    assert mapped.shared == mapped.total > 0
    assert torch.equal(model(x), net(x))
    model.state_dict()["table"].add_(1)
    assert path.read_bytes() == before
    assert torch.allclose(model(x), net(x) + 1)
    # Of equal values, and two all the same.
    first, second = model.state_dict()["first.bias"], model.state_dict()["second.bias"]
    assert first.data_ptr() != second.data_ptr()


def test_weights_of_other_bytes_or_with_a_view_are_not_mapped(tmp_path: Path) -> None:
    net = torch.jit.script(Net().eval())
    net.save(tmp_path / "model.pt")
    with torch.no_grad():
        net.first.weight[2, 5] += 1  # neither at the start nor at the end
    expected = net.first.weight.clone()
    view = net.second.weight.view(-1)
    weights.share(net.parameters(), tmp_path / "model.pt")
    assert torch.equal(net.first.weight, expected)
    assert not shared(net.first.weight, net.second.weight)
    assert view.data_ptr() == net.second.weight.data_ptr()
    assert shared(net.norm.weight)
