"""Sizes that the checks of an AOTInductor package refuse."""

from __future__ import annotations

import os
from pathlib import Path

import build
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.errors import InputError
from torch_py_backend.loading import aotinductor, size_probing
from torch_py_backend.loading.loaded import Loaded

CPU = torch.device("cpu")
MESSAGE = "input_handles[1]: dim value is too small at 1, expected it to be >= 2, but got: 1\n"


def load(folder: Path) -> Loaded:
    inputs = (build.spec("INPUT__0", dims=(-1, -1)), build.spec("INPUT__1", dims=(-1,)))
    artifact = Artifact(ArtifactType.AOTI, folder / "model.pt2")
    return aotinductor.load(artifact, build.config(folder, inputs=inputs), CPU)


class Refusing:
    """A package whose check refuses every call; up to torch 2.11 only the output says why."""

    def __init__(self, *, printing: bool, message: str = MESSAGE) -> None:
        self.printing, self.message = printing, message

    def get_constant_fqns(self) -> list[str]:
        return []

    def get_call_spec(self) -> list[str]:
        tree = torch.utils._pytree
        inputs = tree.tree_structure(((0, 0), {}))
        return [tree.treespec_dumps(inputs), tree.treespec_dumps(tree.tree_structure(0))]

    def run(self, leaves: list[Tensor]) -> list[Tensor]:
        if not self.printing:
            raise RuntimeError(self.message)
        os.write(2, f"Error: {self.message}".encode())
        raise RuntimeError("run_func_( container_handle_, ...) API call failed at container.cpp")


@pytest.mark.parametrize("printing", [False, True])
@pytest.mark.usefixtures("process")
def test_refused_size_names_the_input(
    printing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal names the input and the limit, also if torch only prints the limit."""
    package = Refusing(printing=printing)
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", lambda *_: package)
    with pytest.raises(InputError) as refused:
        load(tmp_path).module(torch.rand(3, 4, 4), torch.rand(3, 1))
    # Without rows: they may fill the batch.
    message = "input 'INPUT__1' has the size 1 in dimension 1; expected at least 2, for which the"
    assert message in str(refused.value)


@pytest.mark.parametrize("printing", [False, True])
@pytest.mark.usefixtures("process")
def test_other_errors_are_unchanged(
    printing: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """An error that is not about a size stays as the package raised it, with its output."""
    package = Refusing(printing=printing, message="out of memory\n")
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", lambda *_: package)
    module = load(tmp_path).module
    with pytest.raises(RuntimeError, match="API call failed" if printing else "out of memory"):
        module(torch.rand(3, 4, 4), torch.rand(3, 1))
    assert ("Error: out of memory\n" in capfd.readouterr().err) is printing


class Limited(Refusing):
    """A package that takes at most 64 rows, without strides of 0."""

    def run(self, leaves: list[Tensor]) -> list[Tensor]:
        rows = leaves[0].shape[0]
        if rows > 64:
            self.message = (
                "input_handles[0]: dim value is too large at 0, expected to be <= 64, but got:"
                f" {rows}\n"
            )
        elif leaves[0].stride()[0] == 0:
            self.message = (
                "input_handles[0]: unmatched stride value at 0, expected: 16, but got: 0\n"
            )
        else:
            return leaves
        return super().run(leaves)


@pytest.mark.parametrize("printing", [False, True])
@pytest.mark.usefixtures("process")
def test_most_rows_of_a_loaded_package(
    printing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on rows is found through the function that names refused inputs."""
    package = Limited(printing=printing)
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", lambda *_: package)
    module = load(tmp_path).module
    columns = [torch.rand(2, 4, 4), torch.rand(2, 4)]
    assert size_probing.most_rows(lambda leaves: module(*leaves), columns) == 64


class Positions(nn.Module):
    """Reads as many values of a buffer as the last dimension of `x` has."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Buffer(torch.arange(16.0))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x + self.positions[: x.shape[2]]) * mask[..., None]


@pytest.mark.slow
@pytest.mark.usefixtures("process")
def test_limits_of_a_real_package(tmp_path: Path) -> None:
    """Sizes outside the limits of the export are refused, in every combination.

    A package reads past the memory of its buffers if only some of its checks are made.
    """
    rows, length = torch.export.Dim("rows", max=64), torch.export.Dim("length")
    shapes = ({0: rows, 1: length, 2: torch.export.Dim("width", max=16)}, {0: rows, 1: length})
    module = Positions().eval()
    program = torch.export.export(
        module, (torch.rand(4, 8, 8), torch.rand(4, 8)), dynamic_shapes=shapes
    )
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    loaded = load(tmp_path)
    for shape, limit in (
        ((3, 2, 2), ""),
        ((3, 5, 16), ""),
        ((3, 1, 8), "1 in dimension 1; expected at least 2,"),
        ((3, 5, 1), "1 in dimension 2; expected at least 2,"),
        ((3, 5, 64), "64 in dimension 2; expected at most 16,"),
        ((3, 1, 64), "1 in dimension 1; expected at least 2,"),
        ((65, 5, 8), "65 in dimension 0; expected at most 64,"),
    ):
        x, mask = torch.rand(shape), torch.rand(shape[:2])
        if limit:
            with pytest.raises(InputError, match=f"'INPUT__0' has the size {limit}"):
                loaded.module(x, mask)
        else:
            torch.testing.assert_close(loaded.module(x, mask), module(x, mask))
