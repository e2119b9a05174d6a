from __future__ import annotations

from pathlib import Path
from typing import Any

import build
import models
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.errors import ArtifactError, ConfigError
from torch_py_backend.loading import discovery, registry
from torch_py_backend.loading.discovery import ArtifactType
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.values import ANY_ROWS

pytestmark = pytest.mark.usefixtures("imports")
CPU = torch.device("cpu")
META = torch.device("meta")
STATE = {
    "linear.weight": torch.arange(6.0).reshape(3, 2),
    "linear.bias": torch.tensor([10.0, 20.0, 30.0]),
    "offset": torch.full((3,), 100.0),
}
SUMS = [15.0, 60.0, 300.0]
X = torch.tensor([[1.0, 2.0]])
Y = torch.tensor([[112.0, 128.0, 144.0]])


class Net(nn.Module):
    """A module with a parameter, a buffer, and a layer that eval() turns off."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.dropout = nn.Dropout(0.99)
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)) + self.offset  # type: ignore[no-any-return]


NET = models.source(Net)


class OnlyEncodes(nn.Module):
    """A module with a method and without forward()."""

    @torch.jit.export
    def encode(self, x: Tensor) -> Tensor:
        return x + 1


def load(folder: Path, device: torch.device | None = CPU, **options: Any) -> Loaded:
    config = build.config(folder, **options)
    return registry.load(discovery.find(config), config, device)


def store(folder: Path, source: str = NET) -> None:
    build.write(folder, "model.py", source)


def store_module(folder: Path) -> None:
    store(folder)
    torch.save(STATE, folder / "1" / "model.pt")


def store_script(folder: Path) -> None:
    module = Net()
    module.load_state_dict(STATE)
    torch.jit.save(torch.jit.script(module), build.write(folder, "model.pt", ""))


def test_model_has_its_weights_is_in_eval_mode_and_needs_no_gradients(tmp_path: Path) -> None:
    store_module(tmp_path / "module")
    store_script(tmp_path / "script")
    for name in ("module", "script"):
        loaded = load(tmp_path / name)
        assert torch.equal(loaded.module(X), Y)  # without eval(), dropout would clear nearly all
        assert loaded.signature.named == ["x"]
        assert sorted(tensor.sum().item() for tensor in loaded.weights) == SUMS
        assert loaded.rows == ANY_ROWS
    assert not any(tensor.requires_grad for tensor in load(tmp_path / "module").weights)


@pytest.mark.parametrize(("device", "expected"), [(CPU, "cpu"), (META, "meta"), (None, "cpu")])
def test_model_is_moved_to_the_device_of_its_instance(
    device: torch.device | None, expected: str, tmp_path: Path
) -> None:
    store_module(tmp_path / "module")
    store_script(tmp_path / "script")
    save_program(build.write(tmp_path / "program", "model.pt2", ""))
    for name in ("module", "script", "program"):
        tensors = load(tmp_path / name, device).weights
        assert {tensor.device.type for tensor in tensors} == {expected}


def test_module_stays_where_its_factory_has_put_it(tmp_path: Path) -> None:
    factories = "def on_meta():\n    return Net().to('meta')\n"
    store(tmp_path, f"{NET}\n{factories}def scripted():\n    return torch.jit.script(Net())\n")

    loaded = load(tmp_path, device=None, model_factory="on_meta", weights="none")
    assert {tensor.device.type for tensor in loaded.weights} == {"meta"}
    script = load(tmp_path, model_factory="scripted", weights="none")
    assert str(script.signature) == "forward(x: torch.Tensor)"
    assert script.module(X).shape == (1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_factory": "make"}, "fails at TypeError: 3 is not a callable object"),
        ({"method": "decode"}, "fails at AttributeError: 'Net' object has no attribute 'decode'"),
        ({"method": "size"}, "fails at TypeError: 3 is not a callable object"),
    ],
)
def test_object_that_cannot_be_called_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    store(tmp_path, f"{NET}    size = 3\n\ndef make():\n    return 3\n")
    with pytest.raises(ArtifactError, match=message):
        load(tmp_path, weights="none", **options)


def test_method_that_torchscript_lacks_is_refused(tmp_path: Path) -> None:
    torch.jit.script(OnlyEncodes()).save(build.write(tmp_path, "model.pt", ""))
    for method in (None, "decode"):
        message = f"model.pt is TorchScript .* has no attribute '{method or 'forward'}'"
        with pytest.raises(ArtifactError, match=message):
            load(tmp_path, method=method)


def save_program(path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(2, 3), (torch.rand(4, 2),)), path)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            ArtifactType.MODULE,
            {"optimize": ("freeze",)},
            "OPTIMIZE freeze is not supported for Python.*freezing",
        ),
        (
            ArtifactType.EXPORTED,
            {"optimize": ("bf16",)},
            "bf16 is not supported for a torch.export",
        ),
        (ArtifactType.AOTI, {"method": "encode"}, "METHOD is not .* It holds one method"),
    ],
)
def test_what_an_artifact_type_does_not_support_is_refused(
    kind: ArtifactType, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.without_unused(build.config(**options), kind)


def test_unused_options_are_logged_and_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    compiled = build.config(
        method="f", optimize=("freeze",), model_class="Net", torch_compile_optional_parameters={}
    )
    used = registry.without_unused(compiled, ArtifactType.TORCHSCRIPT)
    assert used == build.config(method="f", optimize=("freeze",))
    assert "the parameter MODEL_CLASS has no effect on TorchScript" in caplog.text
    assert "MODEL_KWARGS" not in caplog.text


_STEPS = """
from torch import nn

class Net(nn.Module):
    def forward(self, x): ...
    def begin(self, y): ...
    def step(self, states): ...
"""


def test_decoupled_model_has_steps_unless_method_is_set(tmp_path: Path) -> None:
    build.write(tmp_path, "model.py", _STEPS)
    assert str(load(tmp_path).signature) == "forward(x)"
    assert str(load(tmp_path, decoupled=True).signature) == "begin(y)"
    loaded = load(tmp_path, decoupled=True, method="forward")
    assert str(loaded.signature) == "forward(x)"
    assert loaded.step is None
