from __future__ import annotations

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
from torch import Tensor, nn

from torch_py_backend.errors import ArtifactError, InputError
from torch_py_backend.loading import aotinductor, registry
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.processes import instance_status
from torch_py_backend.values import Rows

CPU = torch.device("cpu")
PACKAGE = Path(__file__).parents[2] / "examples/model_repository/digits_aoti/1/model.pt2"
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
def test_package_for_this_machine(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    here = {key: value for key, (_, value) in aotinductor.this_machine(device).items()}
    assert here["AOTI_DEVICE_KEY"] == device.type
    assert here["AOTI_COMPUTE_CAPABILITY"] == ("90" if device.type == "cuda" else "none")
    assert aotinductor.mismatch(package(tmp_path, here), device) == ""


@pytest.mark.usefixtures("process")
def test_what_torch_unpacks_is_removed_with_the_model_and_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, temporary = tmp_path / "server", tmp_path / "temporary"
    (served / "status").mkdir(parents=True)
    temporary.mkdir()
    monkeypatch.setenv(instance_status.VARIABLE, str(served / "status"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    x = build.spec("x", dims=(1, 8, 8))
    settings = build.config(tmp_path, inputs=(x,), outputs=(build.spec("y", dims=(10,)),))
    loaded = aotinductor.load(Artifact(ArtifactType.AOTI, PACKAGE), settings, CPU)
    unpacked = {path.name for path in served.rglob("*.so")}
    loaded.close()
    loaded.close()
    image = torch.zeros(2, 1, 8, 8)
    assert loaded.module(image).shape == (2, 10)  # requests may be in progress
    damaged = build.write(tmp_path, "model.pt2", "no package")
    with pytest.raises(
        ArtifactError, match=r"model\.pt2 is an AOTInductor package .* write it again"
    ):
        registry.load(Artifact(ArtifactType.AOTI, damaged), settings, CPU)
    assert unpacked
    assert [path.name for path in served.iterdir()] == ["status"]
    assert list(temporary.iterdir()) == []
    assert os.environ["TMPDIR"] == str(temporary)


class Positions(nn.Module):
    """Reads as many values of a buffer as the last dimension of `x` has."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Buffer(torch.arange(16.0))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x + self.positions[: x.shape[2]]) * mask[..., None]


@pytest.mark.slow
@pytest.mark.usefixtures("process")
def test_sizes_outside_the_limits_of_the_export_are_refused(tmp_path: Path) -> None:
    # A package reads past the memory of its buffers if only some of its checks are made.
    rows, length = torch.export.Dim("rows", max=64), torch.export.Dim("length")
    shapes = ({0: rows, 1: length, 2: torch.export.Dim("width", max=16)}, {0: rows, 1: length})
    module = Positions().eval()
    program = torch.export.export(
        module, (torch.rand(4, 8, 8), torch.rand(4, 8)), dynamic_shapes=shapes
    )
    path = tmp_path / "model.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    inputs = (build.spec("INPUT__0", dims=(-1, -1)), build.spec("INPUT__1", dims=(-1,)))
    loaded = aotinductor.load(
        Artifact(ArtifactType.AOTI, path), build.config(tmp_path, inputs=inputs), CPU
    )
    assert loaded.rows == Rows(2)
    for shape, limit in (
        ((3, 5, 16), ""),
        ((3, 1, 8), "too small at 1, expected it to be >= 2"),
        ((3, 5, 1), "too small at 2, expected it to be >= 2"),
        ((3, 5, 64), "too large at 2, expected to be <= 16"),
        ((3, 1, 64), "too small at 1, expected it to be >= 2"),
        ((65, 5, 8), "too large at 0, expected to be <= 64"),
    ):
        x, mask = torch.rand(shape), torch.rand(shape[:2])
        if limit:
            with pytest.raises(InputError, match=f"'INPUT__0' does not fit .* {limit}"):
                loaded.module(x, mask)
        else:
            torch.testing.assert_close(loaded.module(x, mask), module(x, mask))


_LOADED_ALONE = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
import torch
import build
from torch_py_backend.loading.discovery import Artifact, ArtifactType
from torch_py_backend.processes import instance_status
from torch_py_backend.signature import binding
from torch_py_backend.loading import aotinductor

processes = []
sys.addaudithook(lambda event, args: event == "subprocess.Popen" and processes.append(args))
config = build.config(inputs=(build.spec("x", dims=(1, 8, 8)),))
artifact = Artifact(ArtifactType.AOTI, Path(sys.argv[2]))
program = aotinductor.load(artifact, config, torch.device("cpu"))
inputs = binding.bind_inputs(["INPUT__0"], program.signature)
scores = inputs.call(program.module, [torch.zeros(2, 1, 8, 8)])
print(scores.shape[-1], processes, [name for name in sys.modules if "torch._dynamo" in name])
"""


def test_package_starts_without_the_compiler() -> None:
    # Testing an instruction set by building a library took 2 to 10 s a load.
    words = [sys.executable, "-c", _LOADED_ALONE, str(Path(__file__).parents[1]), str(PACKAGE)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "10 [] []"
