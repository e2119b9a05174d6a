import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from torch_py_backend.loading import exported_program, mapped_files
from torch_py_backend.loading.mapped_files import AliasOnCopy


def saved(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Tensors that are mapped from a file."""
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(tensors, path)
        return safetensors.torch.load_file(path)
    torch.save(tensors, path)
    mapped: dict[str, Tensor] = torch.load(path, mmap=True, weights_only=True)
    return mapped


def shared(*tensors: Tensor) -> int:
    return mapped_files.measure(tensors).shared


@pytest.fixture(params=["weights.pt", "weights.safetensors"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


# --- adoption --------------------------------------------------------------------------------


def test_copied_weight_is_mapped(path: Path) -> None:
    """The parameter is the same object, in the memory of the file."""
    state = saved(nn.Linear(5, 3).state_dict(), path)
    linear = nn.Linear(5, 3)
    weight = linear.weight
    with AliasOnCopy(state.values()):
        linear.load_state_dict(state)
    assert linear.weight is weight
    assert weight.requires_grad
    assert weight.data_ptr() == state["weight"].data_ptr()
    assert torch.equal(weight, state["weight"])
    assert (
        mapped_files.measure(linear.parameters()).shared
        == linear.weight.nbytes + linear.bias.nbytes
    )


def test_what_a_model_writes_stays_in_its_process(path: Path) -> None:
    """Writing to a weight changes neither the file nor another mapping of it."""
    state = saved({"mean": torch.zeros(4)}, path)
    before = path.read_bytes()
    mean = torch.ones(4)
    with AliasOnCopy(state.values()):
        mean.copy_(state["mean"])
    assert shared(mean)
    mean.add_(7)
    assert path.read_bytes() == before
    again = saved_again(path)["mean"]
    assert torch.equal(again, torch.zeros(4))


def saved_again(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    mapped: dict[str, Tensor] = torch.load(path, mmap=True, weights_only=True)
    return mapped


def _double(weight: Tensor, mapped: Tensor) -> Tensor:
    return weight.double()


def _transposed(weight: Tensor, mapped: Tensor) -> Tensor:
    return weight.t().contiguous().t()


def _viewed(weight: Tensor, mapped: Tensor) -> Tensor:
    HELD.append(weight.view(-1))
    return weight


def _part(weight: Tensor, mapped: Tensor) -> Tensor:
    HELD.append(torch.zeros(8, 4))
    return HELD[-1][:4]


HELD: list[Tensor] = []


@pytest.mark.parametrize("become", [_double, _transposed, _viewed, _part])
def test_weight_that_cannot_be_mapped(
    become: Callable[[Tensor, Tensor], Tensor], path: Path
) -> None:
    """A weight of another dtype or layout, or with a view, is copied."""
    state = saved({"weight": torch.arange(16.0).reshape(4, 4)}, path)
    weight = become(torch.zeros(4, 4), state["weight"])
    with AliasOnCopy(state.values()):
        weight.copy_(state["weight"])
    assert torch.equal(weight.float(), state["weight"])
    assert not shared(weight)
    for view in HELD:
        assert torch.equal(view.flatten()[:16], torch.arange(16.0))
    HELD.clear()


def test_two_weights_of_one_record(tmp_path: Path) -> None:
    """Writing to one of two weights that are one in the file does not change the other."""
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
    """Only memory of the file is shared."""
    state = saved({"weight": torch.ones(4)}, path)
    weight, computed = torch.zeros(4), state["weight"] * 2
    with AliasOnCopy(state.values()):
        weight.copy_(computed)
    computed.zero_()
    assert torch.equal(weight, torch.full((4,), 2.0))


def test_part_of_a_tensor(path: Path) -> None:
    """A part of a tensor is shared, as in modules that split a matrix."""
    state = saved({"qkv": torch.arange(24.0).reshape(6, 4)}, path)
    parts = [torch.zeros(2, 4) for _ in range(3)]
    with AliasOnCopy(state.values()):
        for part, piece in zip(parts, state["qkv"].chunk(3), strict=True):
            part.copy_(piece)
    assert torch.equal(torch.cat(parts), state["qkv"])
    assert shared(*parts) == 24 * 4
    assert all(mapped_files.has_no_other_views(part) for part in parts)


# --- archives --------------------------------------------------------------------------------


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
    made = torch.jit.load(path)
    mapped_files.share(made.state_dict(keep_vars=True).values(), path)
    return made


def exported(net: Net, path: Path) -> Any:
    torch.export.save(torch.export.export(net, (torch.ones(2, 6),)), path)
    return exported_program.load(build.config(max_batch_size=0), path, None).module


@pytest.mark.parametrize("make", [scripted, exported])
def test_weights_of_an_archive(make: Callable[[Net, Path], Any], tmp_path: Path) -> None:
    """All weights are mapped, with the same results; writes stay in the process."""
    torch.manual_seed(0)
    net: Any = Net().eval()
    path, x = tmp_path / "model.pt", torch.rand(2, 6)
    made = make(net, path)
    before = path.read_bytes()
    found = mapped_files.measure(made.state_dict(keep_vars=True).values())
    assert found.shared == found.total > 0
    assert torch.equal(made(x), net(x))
    made.state_dict()["table"].add_(1)
    assert path.read_bytes() == before
    assert torch.allclose(made(x), net(x) + 1)
    # Of equal values, and two all the same.
    first, second = made.state_dict()["first.bias"], made.state_dict()["second.bias"]
    assert first.data_ptr() != second.data_ptr()


def test_a_weight_that_is_not_in_the_archive_stays(tmp_path: Path) -> None:
    """Only equal bytes are shared."""
    net = torch.jit.script(Net().eval())
    net.save(tmp_path / "model.pt")
    with torch.no_grad():
        net.first.weight.add_(1)
    expected = net.first.weight.clone()
    mapped_files.share(net.parameters(), tmp_path / "model.pt")
    assert torch.equal(net.first.weight, expected)
    assert not shared(net.first.weight)
    assert shared(net.second.weight)


def test_compressed_members_are_not_shared(tmp_path: Path) -> None:
    """Compressed members are not shared."""
    path = tmp_path / "model.pt"
    net = torch.jit.script(Net().eval())
    net.save(path)
    buffer = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(buffer) as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for member in plain.infolist():
            out.writestr(member.filename, plain.read(member.filename))
    assert not list(mapped_files.stored_members(path))
    mapped_files.share(net.parameters(), path)
    assert not shared(*net.parameters())


def test_weight_with_a_view_stays(tmp_path: Path) -> None:
    """A weight with a view is not replaced."""
    net = torch.jit.script(Net().eval())
    net.save(tmp_path / "model.pt")
    view = net.second.weight.view(-1)
    mapped_files.share(net.parameters(), tmp_path / "model.pt")
    assert not shared(net.second.weight)
    assert view.data_ptr() == net.second.weight.data_ptr()


@pytest.mark.parametrize("content", [b"", b"PK", b"no archive"])
def test_damaged_archive(content: bytes, tmp_path: Path) -> None:
    """A damaged archive raises an error."""
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(zipfile.BadZipFile):
        list(mapped_files.stored_members(path))
