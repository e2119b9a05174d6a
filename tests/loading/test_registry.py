from __future__ import annotations

from pathlib import Path
from typing import Any

import build
import models
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.errors import ConfigError
from torch_py_backend.loading import discovery, registry
from torch_py_backend.loading.discovery import ArtifactType
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature import binding
from torch_py_backend.signature.arguments import Signature
from torch_py_backend.values import ANY_ROWS, Rows

pytestmark = pytest.mark.usefixtures("imports")
CPU = torch.device("cpu")
META = torch.device("meta")
STATE = {
    "linear.weight": torch.arange(12.0).reshape(3, 4),
    "linear.bias": torch.tensor([10.0, 20.0, 30.0]),
    "offset": torch.full((3,), 100.0),
}
SUMS = [60.0, 66.0, 300.0]
X = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
Y = torch.tensor([[130.0, 180.0, 230.0]])
SOURCE = models.source(models.Affine)


def load(folder: Path, device: torch.device | None = CPU, **options: Any) -> Loaded:
    config = build.config(folder, **options)
    return registry.load(discovery.find(config), config, device)


def store(folder: Path, source: str = SOURCE) -> None:
    build.write(folder, "model.py", source)


def store_module(folder: Path) -> None:
    store(folder)
    torch.save(STATE, folder / "1" / "model.pt")


def store_script(folder: Path) -> None:
    module = models.Affine()
    module.load_state_dict(STATE)
    torch.jit.save(torch.jit.script(module), build.write(folder, "model.pt", ""))


def store_program(folder: Path) -> None:
    export(folder, nn.Linear(2, 3), torch.rand(4, 2))


@pytest.mark.parametrize("store", [store_module, store_script])
def test_model_has_its_weights_in_eval_mode_without_gradients(store: Any, tmp_path: Path) -> None:
    store(tmp_path)
    loaded = load(tmp_path)
    assert torch.equal(loaded.module(X), Y)
    assert loaded.owner is not None
    assert not loaded.owner.training
    assert loaded.signature.named == ["x"]
    assert sorted(tensor.sum().item() for tensor in loaded.weights) == SUMS
    assert loaded.rows == ANY_ROWS
    assert store is store_script or not any(one.requires_grad for one in loaded.weights)


@pytest.mark.parametrize(("device", "expected"), [(META, "meta"), (None, "cpu")])
def test_model_is_moved_to_its_device(device: Any, expected: str, tmp_path: Path) -> None:
    for store in (store_module, store_script, store_program):
        store(tmp_path / store.__name__)
        tensors = load(tmp_path / store.__name__, device).weights
        assert {tensor.device.type for tensor in tensors} == {expected}


def test_module_stays_where_its_factory_has_put_it(tmp_path: Path) -> None:
    on_meta = "def on_meta():\n    return Affine().to('meta')\n"
    scripted = "def scripted():\n    return torch.jit.script(Affine())\n"
    store(tmp_path, f"{SOURCE}\n{on_meta}{scripted}")
    loaded = load(tmp_path, device=None, model_factory="on_meta", weights="none")
    assert {tensor.device.type for tensor in loaded.weights} == {"meta"}
    script = load(tmp_path, model_factory="scripted", weights="none")
    assert str(script.signature) == "forward(x: torch.Tensor)"
    assert script.module(X).shape == (1, 3)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ArtifactType.MODULE, {"optimize": ("freeze",)}, "freeze is not .* for Python.*freezing"),
        (ArtifactType.EXPORTED, {"optimize": ("bf16",)}, "bf16 is not .* for a torch.export"),
        (ArtifactType.AOTI, {"method": "encode"}, "METHOD is not .* It holds one method"),
    ],
)
def test_unsupported_option_is_refused(kind: ArtifactType, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.without_unused(build.config(**options), kind)


def test_decoupled_model_has_steps_unless_method_is_set(tmp_path: Path) -> None:
    more = "    def begin(self, y): ...\n    def step(self, states): ...\n"
    build.write(tmp_path, "model.py", models.source(models.Negate) + more)
    assert load(tmp_path).step is None
    assert str(load(tmp_path, decoupled=True).signature) == "begin(y)"
    loaded = load(tmp_path, decoupled=True, method="forward")
    assert loaded.step is None
    assert loaded.signature.name == "forward"


class Convolution(nn.Conv2d):
    @torch.jit.export
    def raw(self, x: Tensor) -> Tensor:
        return self.forward(x)


def optimized(owner: Any, **options: Any) -> Any:
    loaded = Loaded(build.artifact(), owner.raw, Signature(()), owner)
    return registry.optimize(build.config(**options), loaded)


@pytest.mark.parametrize("make", [nn.Module.eval, torch.jit.script], ids=["module", "script"])
def test_channels_last_changes_the_layout_of_weights(make: Any) -> None:
    owner = make(Convolution(3, 4, 3))
    assert optimized(owner, optimize=("channels_last",)) == owner.raw
    assert owner.weight.is_contiguous(memory_format=torch.channels_last)


def test_method_of_torchscript_is_frozen() -> None:
    script: Any = torch.jit.script(Convolution(3, 4, 3).eval())
    with torch.inference_mode():
        frozen = optimized(script, optimize=("freeze",), method="raw")
        x = torch.rand(2, 3, 8, 8)
        torch.testing.assert_close(frozen(x), script.raw(x), rtol=1e-4, atol=1e-5)
    assert "GetAttr" not in str(frozen.graph)


class Power(nn.Module):
    def forward(self, x: Tensor, n: int, y: Tensor, activation: str = "relu") -> Tensor:
        return torch.relu(x**n + y)


def export(folder: Path, module: nn.Module, *args: Any, dims: Any = None, rows: int = 8) -> Loaded:
    path = build.write(folder, "model.pt2", "")
    torch.export.save(torch.export.export(module.eval(), args, dynamic_shapes=dims), path)
    return load(folder, max_batch_size=rows)


def test_constants_are_passed_as_exported(tmp_path: Path) -> None:
    x, y = torch.full((2, 2), 2.0), torch.full((2, 2), 1.0)
    # The last one has the name of a node.
    program = export(tmp_path, Power(), torch.rand(2, 2), 3, torch.rand(2, 2), "relu")
    assert [*(program.signature.leaves or ())] == ["ARGS[0]", "ARGS[2]"]
    assert program.traced is not None
    assert list(program.traced[0]) == ["x", "y"]
    for names in (["x", "y"], ["INPUT__0", "INPUT__1"], ["ARGS[0]", "ARGS[2]"]):
        inputs = binding.bind_inputs(names, program.signature)
        assert [*inputs.names] == names
        result: Any = inputs.call(program.module, [x, y])
        assert torch.equal(result, x**3 + y)


_X = torch.rand(4, 2)
_DIM = torch.export.Dim


@pytest.mark.parametrize(
    ("module", "args", "dims", "batch", "rows"),
    [
        (nn.ReLU(), [_X], ({0: _DIM("rows")},), 8, Rows(1, None)),
        (nn.ReLU(), [_X], ({0: _DIM("rows", min=2, max=16)},), 8, Rows(2, 16)),
        (nn.ReLU(), [_X], None, 8, Rows(4, 4)),
        (nn.ReLU(), [_X], None, 0, ANY_ROWS),
        # No common dimension 0.
        (nn.CosineSimilarity(), [_X, _X[:1]], None, 8, ANY_ROWS),
    ],
)
def test_row_limits_are_read_from_the_program(
    module: nn.Module, args: list[Tensor], dims: Any, batch: int, rows: Rows, tmp_path: Path
) -> None:
    assert export(tmp_path, module, *args, dims=dims, rows=batch).rows == rows
