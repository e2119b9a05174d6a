from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import build
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.loading import exported
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature import binding
from torch_py_backend.values import ANY_ROWS, Rows

CPU = torch.device("cpu")


class Power(nn.Module):
    def forward(self, x: Tensor, n: int, y: Tensor) -> Tensor:
        return x**n + y


class Total(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum()


def save_program(folder: Path, module: nn.Module, *args: Any, dims: Any = None) -> Path:
    path = build.write(folder, "model.pt2", "")
    program = torch.export.export(module.eval(), args, dynamic_shapes=dims)
    torch.export.save(program, path)
    return path


def loaded(folder: Path, *, rows: int = 8) -> Loaded:
    artifact = Artifact(ArtifactType.EXPORTED, folder / "1" / "model.pt2")
    return exported.load(artifact, build.config(folder, max_batch_size=rows), CPU)


def called(program: Loaded, columns: Mapping[str, Tensor]) -> Any:
    inputs = binding.bind_inputs(list(columns), program.signature)
    return inputs.call(program.module, [columns[name] for name in inputs.names])


def test_constants_are_passed_as_exported(tmp_path: Path) -> None:
    x, y = torch.full((2, 2), 2.0), torch.full((2, 2), 1.0)
    save_program(tmp_path, Power(), torch.rand(2, 2), 3, torch.rand(2, 2))
    program = loaded(tmp_path)
    assert [*(program.signature.leaves or ())] == ["ARGS[0]", "ARGS[2]"]
    for names in (["x", "y"], ["INPUT__0", "INPUT__1"], ["ARGS[0]", "ARGS[2]"]):
        assert torch.equal(called(program, dict(zip(names, (x, y), strict=True))), x**3 + y)


@pytest.mark.parametrize(
    ("size", "rows"),
    [
        (torch.export.Dim("rows"), Rows(1, None)),
        (torch.export.Dim("rows", min=2, max=16), Rows(2, 16)),
        (None, Rows(4, 4)),
    ],
)
def test_row_limits_are_read_from_the_program(size: Any, rows: Rows, tmp_path: Path) -> None:
    save_program(tmp_path, nn.ReLU(), torch.rand(4, 2), dims=({0: size},))
    assert loaded(tmp_path).rows == rows


def test_no_row_limits_without_a_common_dimension_0(tmp_path: Path) -> None:
    save_program(tmp_path, nn.ReLU(), torch.rand(4, 2))
    assert loaded(tmp_path, rows=0).rows == ANY_ROWS
    save_program(tmp_path, Total(), torch.rand(4, 2), torch.rand(3))
    assert loaded(tmp_path).rows == ANY_ROWS
