"""Programs of torch.export."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import build
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError
from torch_py_backend.loading import exported
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature import binding
from torch_py_backend.values import ANY_ROWS, Rows

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


class Power(nn.Module):
    def forward(self, x: Tensor, n: int, y: Tensor) -> Tensor:
        return x**n + y


class Total(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum()


def config(folder: Path, *names: str, rows: int = 8) -> ModelConfig:
    return build.config(
        folder, max_batch_size=rows, inputs=tuple(build.spec(name, dims=(2,)) for name in names)
    )


def save_program(folder: Path, module: nn.Module, args: tuple[Any, ...], dims: Any = None) -> Path:
    path = build.write(folder, "model.pt2", "")
    program = torch.export.export(module.eval(), args, dynamic_shapes=dims)
    torch.export.save(program, path)
    return path


def loaded(folder: Path, *names: str, device: torch.device | None = CPU, rows: int = 8) -> Loaded:
    settings = config(folder, *names, rows=rows)
    artifact = Artifact(ArtifactType.EXPORTED, folder / "1" / "model.pt2")
    return exported.load(artifact, settings, device)


def weights(program: Loaded) -> list[Tensor]:
    assert program.owner is not None
    return [*program.owner.parameters(), *program.owner.buffers()]


def called(program: Loaded, columns: Mapping[str, Tensor]) -> Any:
    inputs = binding.bind_inputs(list(columns), program.signature)
    return inputs.call(program.module, [columns[name] for name in inputs.names])


def dynamic(least: int | None = None, most: int | None = None) -> Any:
    return {0: torch.export.Dim("rows", min=least, max=most)}


def test_program_computes_what_was_exported(tmp_path: Path) -> None:
    """A program is moved to the device of its instance, and returns what its module returns.

    With KIND_MODEL it stays where it was.
    """
    module = Net()
    save_program(tmp_path, module, (torch.rand(4, 2),), dims=(dynamic(),))
    for device, expected in ((torch.device("meta"), "meta"), (None, "cpu"), (CPU, "cpu")):
        program = loaded(tmp_path, "x", device=device)
        assert {tensor.device.type for tensor in weights(program)} == {expected}
    x = torch.rand(5, 2)
    assert torch.equal(called(program, {"x": x}), module(x))


A, B = torch.full((2, 2), 1.0), torch.full((2, 2), 2.0)


def test_constants_are_passed_as_exported(tmp_path: Path) -> None:
    """A number of the export is not an input, and is passed with each call."""
    save_program(tmp_path, Power(), (torch.rand(2, 2), 3, torch.rand(2, 2)))
    program = loaded(tmp_path, "x", "y")
    assert program.signature.leaves == ("ARGS[0]", "ARGS[2]")
    for names in (["x", "y"], ["INPUT__0", "INPUT__1"], ["ARGS[0]", "ARGS[2]"]):
        assert torch.equal(called(program, dict(zip(names, (B, A), strict=True))), B**3 + A)


@pytest.mark.parametrize(
    ("dims", "rows"),
    [
        pytest.param((dynamic(),), Rows(1, None), id="dynamic"),
        pytest.param((dynamic(2, 16),), Rows(2, 16), id="bounds"),
        pytest.param(({1: torch.export.Dim("width")},), Rows(4, 4), id="fixed"),
    ],
)
def test_row_limits_of_a_program(dims: Any, rows: Rows, tmp_path: Path) -> None:
    """The limits of dimension 0 are read from the program."""
    save_program(tmp_path, nn.ReLU(), (torch.rand(4, 2),), dims=dims)
    assert loaded(tmp_path, "x").rows == rows


def test_programs_without_limits(tmp_path: Path) -> None:
    """There are no limits without a batch dimension, or if inputs differ in dimension 0."""
    save_program(tmp_path, Net(), (torch.rand(4, 2),))
    assert loaded(tmp_path, "x", rows=0).rows == ANY_ROWS
    save_program(tmp_path, Total(), (torch.rand(4, 2), torch.rand(3)))
    assert loaded(tmp_path, "x", "y").rows == ANY_ROWS


@pytest.mark.parametrize(
    ("member", "content"), [("weights", None), ("model.json", b"{"), ("version", b"999")]
)
def test_program_that_cannot_be_loaded(member: str, content: bytes | None, tmp_path: Path) -> None:
    """A damaged program, or one of another torch, fails the load with the version of torch."""
    path = save_program(tmp_path, Net(), (torch.rand(4, 2),))
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, old in members.items():
            new = content if member in name else old
            if new is not None:
                file.writestr(name, new)
    with pytest.raises(ArtifactError) as raised:
        loaded(tmp_path, "x")
    text = str(raised.value)
    assert f"model.pt2 is a torch.export program that torch {torch.__version__}" in text
    assert str(tmp_path) not in text


def test_symbolic_number(tmp_path: Path) -> None:
    """A number that was exported as dynamic is served, or refused with an error."""

    class Times(nn.Module):
        def forward(self, x: Tensor, n: int) -> Tensor:
            return x * n

    dims = (dynamic(), torch.export.Dim.DYNAMIC)
    save_program(tmp_path, Times(), (torch.rand(4, 2), 3), dims=dims)
    try:
        assert loaded(tmp_path, "x", "n").signature.leaves == ("ARGS[0]", "ARGS[1]")
    except ArtifactError as error:
        assert "ARGS[1]" in str(error)  # noqa: PT017
