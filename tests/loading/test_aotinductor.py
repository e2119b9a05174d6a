from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import build
import pytest
import torch
from torch.utils import _pytree as pytree

from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import ArtifactError, InputError
from torch_py_backend.loading import aotinductor, registry
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.processes import instance_status
from torch_py_backend.values import ANY_ROWS, Rows

CPU = torch.device("cpu")
_REPOSITORY = Path(__file__).parents[2] / "examples" / "model_repository"
ARTIFACT = Artifact(ArtifactType.AOTI, _REPOSITORY / "digits_aoti" / "1" / "model.pt2")
DIGITS = build.config(inputs=(build.spec("pixels", dims=(1, 8, 8)),))
HERE = {
    "AOTI_DEVICE_KEY": ("device", "cpu"),
    "AOTI_MACHINE": ("processor", "x86_64"),
    "AOTI_CPU_ISA": ("instruction set", "AVX2 AVX512"),
    "torch_version": ("torch", "2.9.1"),
}


def package(folder: Path, metadata: Mapping[str, Any]) -> Path:
    path = build.write(folder, "model.pt2", "")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model/extra/abc_metadata.json", '{"torch_version": "1.0"}')  # a user's own
        name = "model/data/aotinductor/model/abc_metadata.json"
        file.writestr(name, json.dumps(metadata))
    return path


@pytest.mark.parametrize(
    ("built", "difference"),
    [
        (
            {"AOTI_CPU_ISA": "AVX512 AMX_TILE"},
            "instruction set AVX512 AMX_TILE (here: AVX2 AVX512)",
        ),
        ({"AOTI_CPU_ISA": "SOMETHING_NEW"}, ""),
        ({"torch_version": "2.9.1+cu128"}, ""),
        ({"torch_version": "2.10.0"}, "torch 2.10.0 (here: 2.9.1)"),
        (
            {"AOTI_MACHINE": "aarch64", "AOTI_DEVICE_KEY": "cuda"},
            "device cuda (here: cpu), processor aarch64 (here: x86_64)",
        ),
    ],
)
def test_package_for_another_machine(
    built: dict[str, Any], difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aotinductor, "this_machine", lambda device: HERE)
    assert aotinductor.mismatch(package(tmp_path, built), CPU) == difference


@pytest.mark.parametrize("device", [CPU, torch.device("cuda", 0)])
def test_package_built_here(device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    here = {key: value for key, (_, value) in aotinductor.this_machine(device).items()}
    assert here["AOTI_DEVICE_KEY"] == device.type
    assert here["AOTI_COMPUTE_CAPABILITY"] == ("90" if device.type == "cuda" else "none")
    assert aotinductor.mismatch(package(tmp_path, here), device) == ""


@pytest.mark.usefixtures("process")
def test_what_torch_unpacks_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, temporary = tmp_path / "server", tmp_path / "temporary"
    (served / "status").mkdir(parents=True)
    temporary.mkdir()
    monkeypatch.setenv(instance_status.VARIABLE, str(served / "status"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    loaded = aotinductor.load(ARTIFACT, DIGITS, CPU)
    unpacked = {path.name for path in served.rglob("*.so")}
    loaded.close()
    loaded.close()
    assert loaded.module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)  # requests may be in progress
    damaged = build.write(tmp_path, "model.pt2", "no package")
    with pytest.raises(ArtifactError, match=r"is an AOTInductor package .* write it again"):
        registry.load(Artifact(ArtifactType.AOTI, damaged), DIGITS, CPU)
    assert unpacked
    assert [path.name for path in served.iterdir()] == ["status"]
    assert list(temporary.iterdir()) == []
    assert os.environ["TMPDIR"] == str(temporary)


@pytest.mark.usefixtures("process")
def test_sizes_outside_the_limits_of_the_export_are_refused() -> None:
    loaded = aotinductor.load(ARTIFACT, DIGITS, CPU)
    assert loaded.rows == Rows(2)
    for shape, limit in (
        ((1, 1, 8, 8), "too small at 0, expected it to be >= 2"),
        ((65, 1, 8, 8), "too large at 0, expected to be <= 64"),
        ((3, 2, 8, 8), "unmatched dim value at 1, expected: 1"),
        ((3, 1, 7, 8), "unmatched dim value at 2, expected: 8"),
        ((3, 1, 8, 9), "unmatched dim value at 3, expected: 8"),
    ):
        with pytest.raises(InputError, match=f"'pixels' does not fit .* {limit}"):
            loaded.module(torch.zeros(shape))


@dataclasses.dataclass
class _Tree:
    """A package for so many rows and more, whose inputs and results are trees."""

    least: int

    def get_call_spec(self) -> list[str]:
        inputs = pytree.tree_structure(((0, {"z": 0, "a": [0]}), {"scale": 0}))
        return [pytree.treespec_dumps(inputs), ""]

    def run(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        x, z, a, scale = leaves
        if len(x) < self.least:
            raise RuntimeError("input_handles[0]: dim value is too small at 0")
        return [x, (z - a) * scale]


@pytest.mark.parametrize(("least", "rows"), [(1, ANY_ROWS), (2, Rows(2))])
def test_leaves_of_a_tree_are_in_the_order_of_the_package(
    least: int, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = pytree.tree_structure({"y": 0, "nested": [0]})
    monkeypatch.setattr(aotinductor, "mismatch", lambda *_: "")
    monkeypatch.setattr(aotinductor, "open_package", lambda *_: (_Tree(least), results, None))
    names = ("KWARGS[scale]", "ARGS[1][a][0]", "ARGS[0]", "ARGS[1][z]")
    outputs = (build.spec("RESULT[nested][0]"), build.spec("y"))
    config = build.config(inputs=tuple(map(build.spec, names)), outputs=outputs)
    loaded = aotinductor.load(ARTIFACT, config, CPU)
    assert loaded.rows == rows
    scale, a, x, z = sent = torch.rand(4, 1, 4)
    (outcome,) = Engine(config, loaded, CPU).run([dict(zip(names, sent, strict=True))])
    torch.testing.assert_close(outcome, {"RESULT[nested][0]": (z - a) * scale, "y": x})


def test_package_starts_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    # Testing an instruction set by building a library took 2 to 10 s a load.
    for name in ("torch._dynamo", "torch._inductor", *sys.modules):
        if name.startswith(("torch._dynamo", "torch._inductor")):
            monkeypatch.setitem(sys.modules, name, None)  # its import fails
    monkeypatch.setattr(subprocess, "Popen", None)
    loaded = aotinductor.load(ARTIFACT, DIGITS, CPU)
    assert loaded.module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
