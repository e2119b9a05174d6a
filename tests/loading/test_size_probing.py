"""Sizes of 1 that the checks of an AOTInductor package refuse."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import build
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.errors import InputError
from torch_py_backend.loading import aotinductor
from torch_py_backend.loading.loaded import Loaded

CPU = torch.device("cpu")


def refuse(message: str) -> NoReturn:
    raise RuntimeError(message)


def print_and_refuse(message: str) -> NoReturn:
    """Refuse as torch 2.11 does."""
    os.write(2, f"Error: {message}".encode())
    raise RuntimeError("run_func_( container_handle_, ...) API call failed at model_container.cpp")


class Checked:
    """A package with a dynamic dimension, whose checks an environment variable enables."""

    def __init__(
        self,
        compute: Callable[[Tensor, Tensor], list[Tensor]],
        least: int = 2,
        refuse: Callable[[str], NoReturn] = refuse,
    ) -> None:
        self.compute, self.least, self.refuse = compute, least, refuse
        self.checks: bool | None = None

    def get_constant_fqns(self) -> list[str]:
        return []

    def get_call_spec(self) -> list[str]:
        tree = torch.utils._pytree
        x = torch.ones(1)
        inputs = tree.tree_structure(((x, x), {}))
        return [tree.treespec_dumps(inputs), tree.treespec_dumps(tree.tree_structure((x, x)))]

    def run(self, leaves: list[Tensor]) -> list[Tensor]:
        if self.checks is None:  # a library reads it once
            self.checks = os.environ["AOTI_RUNTIME_CHECK_INPUTS"] == "1"
        for number, leaf in enumerate(leaves if self.checks else []):
            if leaf.shape[1] < self.least:
                self.refuse(
                    f"input_handles[{number}]: dim value is too small at 1, expected it to be >="
                    f" {self.least}, but got: {leaf.shape[1]}\n"
                )
            if leaf.stride()[-1] != 1:
                self.refuse(
                    f"input_handles[{number}]: unmatched stride value at {leaf.ndim - 1},"
                    f" expected: 1, but got: {leaf.stride()[-1]}\n"
                )
        return self.compute(*leaves)


def varying(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: Callable[[], Checked]
) -> Loaded:
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", lambda *_: package())
    inputs = (build.spec("x", dims=(-1, 2)), build.spec("mask", dims=(-1,)))
    names = {"ARGS[0]": inputs[0], "ARGS[1]": inputs[1]}
    specs = tuple(dataclasses.replace(spec, name=name) for name, spec in names.items())
    settings = build.config(folder, inputs=specs)
    return aotinductor.load(Artifact(ArtifactType.AOTI, folder / "model.pt2"), settings, CPU)


def masked_mean(x: Tensor, mask: Tensor) -> list[Tensor]:
    weights = mask[..., None]
    return [x * weights, (x * weights).sum(1) / weights.sum(1)]


def mean(x: Tensor, mask: Tensor) -> list[Tensor]:
    return [x + mask[..., None], x.mean(1)]


def sums(x: Tensor, mask: Tensor) -> list[Tensor]:
    return [x.cumsum(1), (x * mask[..., None]).sum(1)]


def counting(x: Tensor, mask: Tensor) -> list[Tensor]:
    return [x * mask[..., None], x.sum(1) + x.shape[1]]


def wrong_for_one(x: Tensor, mask: Tensor) -> list[Tensor]:
    return mean(x, mask) if x.shape[1] > 1 else mean(x + 1, mask)


@pytest.mark.parametrize("refuse", [refuse, print_and_refuse])
@pytest.mark.parametrize(
    ("compute", "served"),
    [
        pytest.param(masked_mean, True, id="masked mean"),
        pytest.param(mean, True, id="mean"),
        pytest.param(sums, True, id="sums"),
        pytest.param(counting, False, id="nothing to compare"),
        pytest.param(wrong_for_one, False, id="wrong"),
    ],
)
@pytest.mark.usefixtures("process")
def test_sizes_of_one(
    compute: Any,
    served: bool,
    refuse: Callable[[str], NoReturn],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A size of 1 is served if the results without checks are correct, and refused otherwise."""
    program = varying(tmp_path, monkeypatch, lambda: Checked(compute, refuse=refuse))
    assert not capfd.readouterr().err
    x, mask = torch.rand(3, 1, 2), torch.rand(3, 1) + 1
    if served:
        assert all(map(torch.equal, program.module(x, mask), compute(x, mask)))
        assert not caplog.messages
    else:
        with pytest.raises(InputError, match=r"'ARGS\[0\]' is \[3, 1, 2\]; expected a size of at"):
            program.module(x, mask)
        assert "aot_inductor.check_lowerbound" in caplog.text
    larger = torch.rand(3, 5, 2), torch.rand(3, 5)
    assert all(map(torch.equal, program.module(*larger), compute(*larger)))
    assert os.environ["AOTI_RUNTIME_CHECK_INPUTS"] == "1"


@pytest.mark.parametrize(
    ("least", "x", "mask"),
    [
        (2, (3, 1, 2), (3, 5)),
        (2, (3, 5, 2), (3, 1)),
        (2, (3, 0, 2), (3, 0)),
        (4, (3, 3, 2), (3, 3)),
    ],
    ids=["one beside five", "five beside one", "zero", "least size of the export"],
)
@pytest.mark.usefixtures("process")
def test_untested_sizes_are_refused(
    least: int,
    x: tuple[int, ...],
    mask: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Sizes that were not tested are refused, and a least size that the export names is kept."""
    program = varying(tmp_path, monkeypatch, lambda: Checked(mean, least))
    with pytest.raises(InputError, match=f"expected a size of at least {least} in dimension 1"):
        program.module(torch.rand(x), torch.rand(mask))
    assert not caplog.messages


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x) * mask[..., None]
        return y, y.mean(1)


@pytest.mark.slow
@pytest.mark.usefixtures("process")
def test_sizes_of_one_of_a_real_package(tmp_path: Path) -> None:
    """A package that AOTInductor built returns what the module returns for a size of 1."""
    module = Pooled().eval()
    rows, length = torch.export.Dim("rows"), torch.export.Dim("length")
    shapes = ({0: rows, 1: length}, {0: rows, 1: length})
    program = torch.export.export(
        module, (torch.rand(4, 8, 2), torch.rand(4, 8)), dynamic_shapes=shapes
    )
    path = tmp_path / "model.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    inputs = (build.spec("INPUT__0", dims=(-1, 2)), build.spec("INPUT__1", dims=(-1,)))
    artifact = Artifact(ArtifactType.AOTI, path)
    loaded = aotinductor.load(artifact, build.config(tmp_path, inputs=inputs), CPU)
    for size in (1, 2, 5):
        x, mask = torch.rand(3, size, 2), torch.rand(3, size)
        with torch.inference_mode():
            expected = module(x, mask)
        for actual, value in zip(loaded.module(x, mask), expected, strict=True):
            torch.testing.assert_close(actual, value)
