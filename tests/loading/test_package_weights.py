"""Packages of AOTInductor that were compiled without their weights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_py_backend.artifacts import discovery, file_types
from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ArtifactError, ConfigError, LoadError, WeightsError
from torch_py_backend.loading import package_weights, registry
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.weights import sharing_report, weight_swap

CPU = torch.device("cpu")
X = torch.arange(32.0).reshape(4, 8) / 32


class Various(nn.Module):
    """Weights of all kinds that a package treats differently."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.transposed = nn.Parameter(torch.rand(8, 6).t())
        self.part = nn.Parameter(torch.rand(100)[10:18])
        self.conv = nn.Conv2d(2, 4, 3)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.scale: Tensor
        self.register_buffer("scale", torch.rand(8))
        self.shift: Tensor
        self.register_buffer("shift", torch.rand(8), persistent=False)
        self.scalar: Tensor
        self.register_buffer("scalar", torch.tensor(3.0))
        self.small: Tensor
        self.register_buffer("small", torch.randint(-8, 8, (8, 8), dtype=torch.int8))
        self.brief = nn.Parameter(torch.rand(8).bfloat16())
        self.plain = torch.rand(50)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.second(self.first(x)) * self.scale + self.shift * self.scalar
        y = y + x @ self.small.float() + self.brief + torch.tensor([*map(float, range(8))])
        y = (y @ self.transposed.t() @ self.transposed + self.plain[:8]) * self.part
        return y, self.conv(x[:, None, None, :].expand(-1, 2, 8, 8))


class Folded(nn.Module):
    """Constants that a package computes from its weights, and tied weights beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(x @ (self.first.weight * 2 + 1))
        return result


def _compiled(
    folder: Path, model: nn.Module, configs: dict[str, Any] | None = None, least: int = 1
) -> Path:
    rows = torch.export.Dim("rows", min=least, max=16)
    program = torch.export.export(model.eval(), (X[:2],), dynamic_shapes=({0: rows},))
    package_weights.compile_package(program, folder / "model.pt2", configs)
    return folder


@pytest.fixture(scope="session")
def various(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A folder with model.pt2 and model.safetensors, and the module that they were made from."""
    torch.manual_seed(0)
    model = Various()
    return _compiled(tmp_path_factory.mktemp("various"), model), model


@pytest.fixture(scope="session")
def folded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    torch.manual_seed(0)
    model = Folded()
    configs = {"aot_inductor.use_runtime_constant_folding": True}
    return _compiled(tmp_path_factory.mktemp("folded"), model, configs), model


@pytest.fixture(scope="session")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A package that contains its weights, beside a file that does not belong to it."""
    torch.manual_seed(0)
    model = Folded().eval()
    program = torch.export.export(model, (X,))
    path = tmp_path_factory.mktemp("complete") / "model.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    safetensors.torch.save_file({"x": X}, path.with_suffix(".safetensors"))
    return path.parent, model


def stored(source: Path, folder: Path) -> Path:
    """Copy a package and its weights into a version folder; return that of the weights."""
    (folder / "1").mkdir(parents=True)
    for path in source.iterdir():
        shutil.copy(path, folder / "1")
    return folder / "1" / "model.safetensors"


def settings(folder: Path, **options: Any) -> ModelConfig:
    specs = (build.spec("INPUT__0", dims=(8,)),)
    return build.config(folder, inputs=specs, max_batch_size=4, **options)


def load(folder: Path, **options: Any) -> Loaded:
    config = settings(folder, **options)
    return registry.load(discovery.find(config), config, CPU)


def agree(results: Any, expected: Any) -> bool:
    pairs = zip(*map(pytree.tree_leaves, (results, expected)), strict=True)
    return all(torch.allclose(result, value, rtol=1e-4, atol=1e-4) for result, value in pairs)


def changed(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Replace a file of weights by a changed one, in one step."""
    state = safetensors.torch.load_file(path)
    change(state)
    safetensors.torch.save_file(state, path.with_name("next"))
    path.with_name("next").replace(path)


@pytest.mark.parametrize("name", ["various", "folded"])
@pytest.mark.usefixtures("process")
def test_package_runs_on_weights_beside_it(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A package without weights returns what the module returns, on the pages of their file."""
    source, model = request.getfixturevalue(name)
    path = stored(source, tmp_path)
    loaded = load(tmp_path)
    assert loaded.kind is ArtifactType.AOTI
    assert agree(loaded.module(X), model(X))
    report = sharing_report.report(settings(tmp_path), loaded)
    state = safetensors.torch.load_file(path)
    assert set(weight_swap.weights(loaded)) == set(state)
    # Those that are not contiguous in the module are copied: files hold contiguous ones.
    copied = sum(state[key].nbytes for key in ("transposed", "conv.weight") if key in state)
    assert report.mapped.total - report.mapped.shared == copied
    assert report.mapped.shared > 0


def test_file_of_weights_has_every_constant(various: tuple[Path, nn.Module]) -> None:
    """The file has literals, too, and tied weights once, and no weights that are not used."""
    state = safetensors.torch.load_file(various[0] / "model.safetensors")
    constants = file_types.external_constants(various[0] / "model.pt2")
    assert constants is not None
    assert state.keys() == constants.keys()
    tied = {"first.weight", "second.weight"}
    assert len(tied & state.keys()) == 1
    expected = {key for key in various[1].state_dict() if not key.startswith("unused")} - tied
    assert expected | {"shift"} < state.keys()
    assert len([key for key in state if key.startswith("_tensor_constant")]) == 2
    assert (constants["small"].dtype, constants["brief"].dtype) == ("int8", "bfloat16")
    assert (constants["transposed"].shape, constants["transposed"].stride) == ((6, 8), (1, 6))


WRONG: list[Any] = [
    pytest.param(
        lambda state: state.update(scale=torch.rand(2)),
        r"wrong shapes \(1\): scale \[2\] instead of \[8\]",
        id="shape",
    ),
    pytest.param(lambda state: state.pop("scale"), r"missing keys \(1\): scale;?", id="missing"),
    pytest.param(
        lambda state: state.update(more=torch.rand(2)), r"unexpected keys \(1\): more", id="more"
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
@pytest.mark.usefixtures("process")
def test_weights_that_do_not_fit(
    change: Callable[[dict[str, Tensor]], object],
    message: str,
    tmp_path: Path,
    various: tuple[Path, nn.Module],
) -> None:
    """Wrong weights fail the load with one sentence: the package itself would read any memory."""
    changed(stored(various[0], tmp_path), change)
    with pytest.raises(WeightsError, match=message) as raised:
        load(tmp_path)
    assert "under the names of the package's get_constant_fqns()" in str(raised.value)


@pytest.mark.usefixtures("process")
def test_weights_of_another_dtype_are_converted(
    tmp_path: Path, various: tuple[Path, nn.Module]
) -> None:
    """Weights of another dtype are converted to that of the package, as those of a module are."""
    path = stored(various[0], tmp_path)
    changed(path, lambda state: state.update(scale=state["scale"].double()))
    loaded = load(tmp_path)
    assert agree(loaded.module(X), various[1](X))
    assert weight_swap.weights(loaded)["scale"].dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"weights": "none"}])
@pytest.mark.usefixtures("process")
def test_package_without_weights_is_refused(
    options: dict[str, Any], tmp_path: Path, various: tuple[Path, nn.Module]
) -> None:
    """A package without weights, which would end the process, is refused; FALLBACK is served."""
    path = stored(various[0], tmp_path)
    if not options:
        path.unlink()
    reason = "WEIGHTS is 'none'" if options else "no file of weights is beside it"
    with pytest.raises(ArtifactError, match=f"was compiled without its weights, and {reason}; exp"):
        load(tmp_path, **options)
    torch.jit.trace(nn.Identity(), X).save(tmp_path / "1" / "net.pt")
    loaded = load(tmp_path, fallback="net.pt", **options)
    assert loaded.kind is ArtifactType.TORCHSCRIPT


def _repacked(path: Path, kept: Callable[[str], bool], edit: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as package:
        members = {name: package.read(name) for name in package.namelist() if kept(name)}
    with zipfile.ZipFile(path, "w") as package:
        for name, content in members.items():
            package.writestr(name, edit(content) if name.endswith("wrapper.cpp") else content)


UNKNOWN: list[Any] = [
    pytest.param(lambda name: not name.endswith(".cpp"), bytes, id="no source"),
    pytest.param(
        lambda name: True,
        lambda source: source.replace(b'original_fqn = "scale"', b'original_fqn = "other"'),
        id="other names",
    ),
    pytest.param(
        lambda name: True,
        lambda source: source.replace(b"constants_info_[", b"constants["),
        id="another form",
    ),
    pytest.param(
        lambda name: True,
        lambda source: source.replace(
            b"cached_torch_layout_strided", b"cached_torch_layout_mkldnn"
        ),
        id="opaque layouts",
    ),
]


@pytest.mark.parametrize(("kept", "edit"), UNKNOWN)
@pytest.mark.usefixtures("process")
def test_package_whose_constants_are_not_known(
    kept: Callable[[str], bool],
    edit: Callable[[bytes], bytes],
    tmp_path: Path,
    various: tuple[Path, nn.Module],
) -> None:
    """A package whose source does not describe what it lacks is refused before it is called."""
    path = stored(various[0], tmp_path)
    _repacked(path.with_suffix(".pt2"), kept, edit)
    with pytest.raises(LoadError, match=r"shapes are not known|do not fit the module"):
        load(tmp_path)


@pytest.mark.parametrize("stripped", [False, True])
@pytest.mark.usefixtures("process")
def test_package_with_its_weights(
    stripped: bool, tmp_path: Path, complete: tuple[Path, nn.Module]
) -> None:
    """A package that contains its weights is served as it is, whatever lies beside it."""
    path = stored(complete[0], tmp_path).with_suffix(".pt2")
    if stripped:
        _repacked(path, lambda name: not name.endswith(".cpp"), bytes)
    loaded = load(tmp_path)
    assert loaded.artifact.weights is None
    assert loaded.owner is None
    assert agree(loaded.module(X), complete[1](X))
    assert "contains them" in str(sharing_report.report(settings(tmp_path), loaded))
    with pytest.raises(ConfigError, match="WATCH_WEIGHTS is set, and the AOTInductor package co"):
        weight_swap.refuse_unsupported(settings(tmp_path, watch_weights=True), loaded)


@pytest.mark.parametrize("name", ["various", "folded"])
@pytest.mark.usefixtures("process")
def test_weights_are_replaced(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """New weights are served from the new file's pages; what was computed from old ones is not."""
    source, model = request.getfixturevalue(name)
    path = stored(source, tmp_path)
    loaded = load(tmp_path)
    loaded.module(X)
    before = sharing_report.mapped(loaded)

    def doubled(state: dict[str, Tensor]) -> None:
        for tensor in state.values():
            tensor.mul_(2)

    changed(path, doubled)
    config = settings(tmp_path)
    replacement = weight_swap.read(config, loaded)
    weight_swap.swap(config, loaded, replacement)
    del replacement
    expected = load(tmp_path).module(X)
    assert not agree(loaded.module(X), model(X))
    assert agree(loaded.module(X), expected)
    assert sharing_report.mapped(loaded)[:2] == before[:2]
    changed(path, lambda state: state.update(more=torch.rand(2)))
    with pytest.raises(WeightsError, match="unexpected keys"):
        weight_swap.read(config, loaded)
    assert agree(loaded.module(X), expected)


def test_frozen_graphs_in_this_process(tmp_path: Path) -> None:
    """A process that freezes the graphs of torch.compile compiles a package without weights."""
    program = torch.export.export(nn.Linear(4, 4).eval(), (torch.rand(2, 4),))
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        package_weights.compile_package(program, tmp_path / "model.pt2")
    constants = file_types.external_constants(tmp_path / "model.pt2")
    assert constants is not None
    assert {constant.shape for constant in constants.values()} == {(4, 4), (4,)}


_LOADED_ALONE = """
import sys
from pathlib import Path
import test_package_weights as tests
loaded = tests.load(Path(sys.argv[1]))
loaded.module(tests.X)
inside, sizes = False, {"Rss:": 0, "Anonymous:": 0}
for line in Path("/proc/self/smaps").read_text().splitlines():
    first, *_, last = line.split()
    if "-" in first and not first.endswith(":"):
        inside = last == str(Path(sys.argv[1]) / "1/model.safetensors")
    elif inside and first in sizes:
        sizes[first] += int(line.split()[1])
print(*sizes.values())
"""


def test_processes_map_the_same_file(tmp_path: Path, various: tuple[Path, nn.Module]) -> None:
    """A process has mapped the file and has written to no page of it: all processes share them."""
    stored(various[0], tmp_path)
    folders = map(str, (Path(__file__).parent, Path(__file__).parents[1]))
    environment = {**os.environ, "PYTHONPATH": ":".join(folders)}
    words = [sys.executable, "-c", _LOADED_ALONE, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    resident, written = map(int, done.stdout.split())
    assert resident > 0
    assert written == 0
