import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend.artifacts import discovery
from torch_py_backend.artifacts.discovery import Artifact, ArtifactType
from torch_py_backend.batching.gather_scatter import ANY_ROWS, Rows
from torch_py_backend.config import sequence_config
from torch_py_backend.errors import (
    ArtifactError,
    ConfigError,
    LoadError,
    SourceError,
    WeightsError,
)
from torch_py_backend.loading import aotinductor, registry
from torch_py_backend.loading.loaded import Loaded
from torch_py_backend.signature.binding import Passing

CPU = torch.device("cpu")
META = torch.device("meta")
NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.dropout = nn.Dropout(0.99)
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x):
        return self.dropout(self.linear(x)) + self.offset
"""
STATE = {
    "linear.weight": torch.arange(6.0).reshape(3, 2),
    "linear.bias": torch.tensor([10.0, 20.0, 30.0]),
    "offset": torch.full((3,), 100.0),
}
X = torch.tensor([[1.0, 2.0]])
Y = torch.tensor([[112.0, 128.0, 144.0]])


class Net(nn.Module):
    """The class of the source above."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.dropout = nn.Dropout(0.99)
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.linear(x)) + self.offset
        return result


class OnlyEncodes(nn.Module):
    """A module with a method and without forward()."""

    @torch.jit.export
    def encode(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.fixture(autouse=True)
def imports(tmp_path: Path) -> Iterator[None]:
    """Restore sys.modules and sys.path after the test."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def load(folder: Path, device: torch.device | None = CPU, **options: Any) -> Loaded:
    config = build.config(folder, **options)
    return registry.load(discovery.find(config), config, device)


def store(folder: Path, source: str = NET, state: dict[str, Tensor] | None = None) -> None:
    build.write(folder, "model.py", source)
    if state is not None:
        torch.save(state, folder / "1" / "model.pt")


def store_script(folder: Path, script: Any) -> Path:
    path = build.write(folder, "model.pt", "")
    torch.jit.save(script, path)
    return path


def net() -> Net:
    module = Net()
    module.load_state_dict(STATE)
    return module


def scripted() -> Any:
    return torch.jit.script(net())


# --- Python source ---------------------------------------------------------------------------


def test_module_is_ready_to_be_called(tmp_path: Path) -> None:
    """A source becomes a module with its weights, in eval mode, without gradients."""
    store(tmp_path, state=STATE)

    loaded = load(tmp_path)

    assert isinstance(loaded.module, nn.Module)
    assert torch.equal(loaded.module(X), Y)  # without eval(), dropout would clear nearly all
    assert not any(part.training for part in loaded.module.modules())
    assert not any(tensor.requires_grad for tensor in loaded.weights)
    assert [one.name for one in loaded.signature.arguments] == ["x"]


def test_weights_are_parameters_and_buffers(tmp_path: Path) -> None:
    """The weights are all parameters and buffers."""
    store(tmp_path, state=STATE)

    assert sorted(tensor.sum().item() for tensor in load(tmp_path).weights) == [15.0, 60.0, 300.0]


@pytest.mark.parametrize(
    ("device", "found"),
    [
        pytest.param(CPU, "cpu", id="CPU"),
        pytest.param(META, "meta", id="another device"),
        pytest.param(None, "cpu", id="where it is"),
    ],
)
def test_module_is_moved_to_its_device(
    device: torch.device | None, found: str, tmp_path: Path
) -> None:
    """A module is moved to the device of its instance; without one it stays where it is."""
    store(tmp_path, state=STATE)

    assert {tensor.device.type for tensor in load(tmp_path, device).weights} == {found}


def test_module_places_itself(tmp_path: Path) -> None:
    """With KIND_MODEL the module is not moved."""
    store(tmp_path, NET + "def make():\n    return Net().to('meta')\n")

    loaded = load(tmp_path, device=None, model_factory="make", weights="none")

    assert {tensor.device.type for tensor in loaded.weights} == {"meta"}


def test_module_without_its_weights_is_refused(tmp_path: Path) -> None:
    """A module with random weights is not served."""
    store(tmp_path)

    with pytest.raises(ArtifactError, match="Net has 3 weights, and there is no weights file"):
        load(tmp_path)


def test_weights_of_another_class_are_refused(tmp_path: Path) -> None:
    """A file without one of the weights fails the load."""
    store(tmp_path, state={"linear.weight": STATE["linear.weight"]})

    with pytest.raises(WeightsError, match=r"missing keys \(2\)"):
        load(tmp_path)


def test_weights_none(tmp_path: Path) -> None:
    """With WEIGHTS none the values of the constructor are served."""
    store(tmp_path, state=STATE)

    loaded = load(tmp_path, weights="none")

    assert torch.equal(list(loaded.weights)[-1], torch.ones(3))


def test_module_without_weights_needs_no_file(tmp_path: Path) -> None:
    """A module without weights needs only its source."""
    store(tmp_path, "from torch import nn\nclass Net(nn.ReLU): ...\n")

    loaded = load(tmp_path)

    assert list(loaded.weights) == []
    assert torch.equal(loaded.module(-X), torch.zeros(1, 2))


def test_function_is_served(tmp_path: Path) -> None:
    """A function is served without weights."""
    store(tmp_path, "def double(x, factor=2):\n    return factor * x\n")

    loaded = load(tmp_path)

    assert loaded.module(4) == 8
    assert list(loaded.weights) == []
    assert [one.name for one in loaded.signature.arguments] == ["x", "factor"]
    assert str(loaded.signature) == "double(x, factor=2)"


def test_callable_object_is_served(tmp_path: Path) -> None:
    """An instance of a class that is not a module is served if it is callable."""
    store(tmp_path, "class Scaled:\n    def __call__(self, x):\n        return 3 * x\n")

    assert load(tmp_path, model_class="Scaled").module(2) == 6


def test_weights_beside_a_function_are_refused(tmp_path: Path) -> None:
    """A file of weights beside a function is an error."""
    store(tmp_path, "def double(x):\n    return 2 * x\n", state=STATE)

    with pytest.raises(ArtifactError) as raised:
        load(tmp_path)

    assert "model 'digits': model.pt is beside a function" in str(raised.value)
    assert 'set the parameter WEIGHTS to "none"' in str(raised.value)
    assert load(tmp_path, weights="none").module(4) == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"model_factory": "make"}, "what model.py builds is a int", id="factory"),
        pytest.param({"model_class": "Size"}, "what model.py builds is a Size", id="class"),
    ],
)
def test_result_that_is_not_callable(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    """A factory must return a module or a function."""
    store(tmp_path, "def make():\n    return 3\nclass Size: ...\n")

    with pytest.raises(SourceError) as raised:
        load(tmp_path, **options)

    assert f"model 'digits': {said}" in str(raised.value)
    assert "expected a torch.nn.Module or a function" in str(raised.value)


def test_factory_may_return_torchscript(tmp_path: Path) -> None:
    """A factory may return a scripted module."""
    store(tmp_path, NET + "def make():\n    return torch.jit.script(Net())\n")

    loaded = load(tmp_path, model_factory="make", weights="none")

    assert [one.name for one in loaded.signature.arguments] == ["x"]
    assert loaded.module(X).shape == (1, 3)


def test_function_without_a_signature(tmp_path: Path) -> None:
    """A built-in function without a signature is refused."""
    store(tmp_path, "from torch import relu\n")

    with pytest.raises(SourceError, match="'digits': the arguments of what is served cannot be"):
        load(tmp_path, model_class="relu")


# --- TorchScript -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(scripted, id="script"),
        pytest.param(
            lambda: torch.jit.trace(net().eval(), X),
            id="trace",
        ),
        pytest.param(lambda: torch.jit.freeze(scripted().eval()), id="freeze"),
    ],
)
def test_torchscript_is_ready_to_be_called(make: Any, tmp_path: Path) -> None:
    """TorchScript is loaded in eval mode."""
    store_script(tmp_path, make())

    loaded = load(tmp_path)

    assert torch.equal(loaded.module(X), Y)
    assert [(one.name, one.required, one.passing) for one in loaded.signature.arguments] == [
        ("x", True, Passing.POSITIONAL)
    ]


def test_torchscript_has_weights(tmp_path: Path) -> None:
    """The weights of TorchScript are its parameters and buffers."""
    store_script(tmp_path, scripted())

    assert sorted(tensor.sum().item() for tensor in load(tmp_path).weights) == [15.0, 60.0, 300.0]


@pytest.mark.parametrize(("device", "found"), [(CPU, "cpu"), (META, "meta"), (None, "cpu")])
def test_torchscript_is_loaded_onto_its_device(
    device: torch.device | None, found: str, tmp_path: Path
) -> None:
    """TorchScript is loaded onto the device of its instance."""
    store_script(tmp_path, scripted())

    assert {tensor.device.type for tensor in load(tmp_path, device).weights} == {found}


def test_torchscript_without_forward_is_refused(tmp_path: Path) -> None:
    """TorchScript without forward() is refused."""
    store_script(tmp_path, torch.jit.script(OnlyEncodes()))

    with pytest.raises(ArtifactError) as raised:
        load(tmp_path)

    assert "model 'digits': model.pt is TorchScript without forward()" in str(raised.value)


@pytest.mark.parametrize(
    ("member", "old", "new"),
    [
        pytest.param("data.pkl", b"", None, id="without data.pkl"),
        pytest.param("constants.pkl", b"", None, id="without constants.pkl"),
        pytest.param("version", b"", None, id="without version"),
        pytest.param(".py", b"", None, id="without code"),
        pytest.param(".py", b"forward", b"for ward", id="code of no language"),
        pytest.param(".py", b"offset", b"\xff\xff", id="code that is not UTF-8"),
        pytest.param("data.pkl", b"offset", b"offsit", id="weight of another name"),
    ],
)
def test_torchscript_that_cannot_be_loaded(
    member: str, old: bytes, new: bytes | None, tmp_path: Path
) -> None:
    """The error names the version of torch and its reason."""
    path = store_script(tmp_path, scripted())
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            if not name.endswith(member):
                file.writestr(name, content)
            elif new is not None:
                file.writestr(name, content.replace(old, new))

    with pytest.raises(ArtifactError) as raised:
        load(tmp_path)

    text = str(raised.value)
    assert isinstance(raised.value, LoadError)
    assert f"model 'digits': model.pt is TorchScript that torch {torch.__version__} cannot" in text
    assert "Write it again with torch.jit.save" in text
    assert str(tmp_path) not in text


# --- METHOD ----------------------------------------------------------------------------------

METHODS = """
import torch
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        raise NotImplementedError

    def encode(self, image, *, scale=2):
        return image * scale

    size = 3
"""


@pytest.mark.parametrize("device", [CPU, META], ids=str)
def test_method_of_a_module_is_served(device: torch.device, tmp_path: Path) -> None:
    """METHOD names the method that is called, with its own arguments."""
    store(tmp_path, METHODS)

    loaded = load(tmp_path, device, method="encode")

    assert torch.equal(loaded.module(X), 2 * X)
    assert str(loaded.signature) == "encode(image, *, scale=2)"


def test_method_keeps_its_modules_weights(tmp_path: Path) -> None:
    """The module of a method is filled and put into eval mode."""
    store(tmp_path, NET.replace("def forward", "def encode"), STATE)

    loaded = load(tmp_path, method="encode")

    assert torch.equal(loaded.module(X), Y)
    assert len(list(loaded.weights)) == 3


def test_method_of_an_object_is_served(tmp_path: Path) -> None:
    """METHOD also names a method of an object that is not a module."""
    source = "class Net:\n    def encode(self, x):\n        return x + 1\n    __call__ = None\n"
    store(tmp_path, source + "def make():\n    return lambda x: x\n")

    assert load(tmp_path, model_factory="make", method="__call__").module(1) == 1


def test_method_of_torchscript_is_served(tmp_path: Path) -> None:
    """METHOD also names an exported method of TorchScript, which needs no forward()."""
    store_script(tmp_path, torch.jit.script(OnlyEncodes()))

    loaded = load(tmp_path, method="encode")

    assert torch.equal(loaded.module(X), X + 1)
    assert [one.name for one in loaded.signature.arguments] == ["x"]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        pytest.param("decode", "METHOD is 'decode', which Net does not have", id="missing"),
        pytest.param(
            "size", "the arguments of what is served cannot be determined", id="no method"
        ),
    ],
)
def test_unknown_method(method: str, said: str, tmp_path: Path) -> None:
    """A name without a method fails the load."""
    store(tmp_path, METHODS)

    with pytest.raises(SourceError) as raised:
        load(tmp_path, method=method)

    assert f"model 'digits': {said}" in str(raised.value)


@pytest.mark.parametrize("method", ["encode", "training"])
def test_method_that_torchscript_lacks_is_refused(method: str, tmp_path: Path) -> None:
    """A method that TorchScript does not export is refused by its name."""
    store_script(tmp_path, scripted())

    with pytest.raises(ArtifactError, match=rf"model\.pt is TorchScript without {method}\(\)"):
        load(tmp_path, method=method)


# --- factories of packages -------------------------------------------------------------------


def test_package_builds_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of an installed package is built, and filled from the version folder."""
    (tmp_path / "package_with_a_net.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "digits"
    torch.save(STATE, build.write(folder, "model.pt", ""))

    loaded = load(folder, model_factory="package_with_a_net:Net")

    assert loaded.kind is ArtifactType.FACTORY
    assert torch.equal(loaded.module(X), Y)


def test_package_without_its_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of a package is not served with random weights, unless the config says so."""
    (tmp_path / "package_without_weights.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "digits"
    (folder / "1").mkdir(parents=True)
    factory = "package_without_weights:Net"

    with pytest.raises(ArtifactError, match="Net has 3 weights, and there is no weights file"):
        load(folder, model_factory=factory)
    assert load(folder, model_factory=factory, weights="none").module(X).shape == (1, 3)


def test_pretrained_module_has_read_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of from_pretrained() needs no file of weights."""
    source = NET + (
        "    @classmethod\n    def from_pretrained(cls, folder, local_files_only):\n"
        "        return cls()\n"
    )
    (tmp_path / "package_with_pretrained.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "digits"
    build.write(folder, "config.json", "{}")

    loaded = load(folder, model_factory="package_with_pretrained:Net")

    assert len(list(loaded.weights)) == 3


# --- programs --------------------------------------------------------------------------------


def store_program(folder: Path) -> None:
    path = build.write(folder, "model.pt2", "")
    rows = torch.export.Dim("rows", min=2, max=16)
    x = torch.rand(4, 2)
    torch.export.save(torch.export.export(net().eval(), (x,), dynamic_shapes=({0: rows},)), path)


def store_package(folder: Path, name: str = "model.pt2") -> None:
    """A file with the type of a package that cannot be loaded."""
    with zipfile.ZipFile(build.write(folder, name, ""), "w") as file:
        file.writestr("model/data/aotinductor/model/abc.wrapper.so", "")


def test_exported_program_is_ready_to_be_called(tmp_path: Path) -> None:
    """A program is loaded with its arguments, its weights and its row limits."""
    store_program(tmp_path)

    loaded = load(tmp_path)

    assert loaded.kind is ArtifactType.EXPORTED
    assert torch.equal(loaded.module(X.expand(2, -1)), Y.expand(2, -1))
    assert str(loaded.signature) == "forward(x)"
    assert len(list(loaded.weights)) == 3
    assert loaded.rows == Rows(2, 16)


@pytest.mark.parametrize("store_it", [store_program, store_package], ids=["export", "AOTI"])
def test_method_of_a_program_is_refused(store_it: Any, tmp_path: Path) -> None:
    """METHOD is refused for a program, which is one method."""
    store_it(tmp_path)

    with pytest.raises(ConfigError, match=r"METHOD is set, and model\.pt2 is .*; expected|take"):
        load(tmp_path, method="encode")


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        ("export", "model_class", "Net"),
        ("export", "model_kwargs", {"size": 3}),
        ("export", "weights", "none"),
        ("jit", "model_class", "Net"),
        ("jit", "model_kwargs", {}),
        ("jit", "weights", "none"),
    ],
)
def test_option_without_effect(
    kind: str, option: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An option without effect on the artifact is logged."""
    if kind == "jit":
        store_script(tmp_path, scripted())
    else:
        store_program(tmp_path)

    load(tmp_path, **{option: value})

    (told,) = [one for one in caplog.messages if "digits" in one]
    assert f"'digits': the parameter {option.upper()} has no effect: the artifact is" in told


def test_package_for_another_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package for another machine is refused before it is loaded."""
    store_package(tmp_path)
    monkeypatch.setattr(aotinductor, "mismatch", lambda path, device: "processor sparc (here: x86)")

    with pytest.raises(ArtifactError) as raised:
        load(tmp_path)

    assert "'digits': model.pt2 was built for processor sparc (here: x86)" in str(raised.value)
    assert "with the parameter FALLBACK" in str(raised.value)


def test_fallback_is_served_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FALLBACK is served, with a warning, if the package is for another machine."""
    store(tmp_path, state=STATE)
    store_package(tmp_path)
    monkeypatch.setattr(aotinductor, "mismatch", lambda path, device: "processor sparc")

    loaded = load(tmp_path, default_model_filename="model.pt2", fallback="model.py")

    assert loaded.kind is ArtifactType.MODULE
    assert torch.equal(loaded.module(X), Y)
    assert caplog.messages == [
        "model 'digits': model.pt2 was built for processor sparc. model.py is served instead."
    ]


def test_fallback_is_served_where_the_package_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FALLBACK is served if the package cannot be loaded."""
    store(tmp_path, state=STATE)
    store_package(tmp_path)
    monkeypatch.setattr(aotinductor, "mismatch", lambda path, device: "")

    loaded = load(tmp_path, default_model_filename="model.pt2", fallback="model.py")

    assert loaded.kind is ArtifactType.MODULE
    (message,) = [one.getMessage() for one in caplog.records if "torch_py" in one.name]
    assert "model.pt2 is an AOTInductor package that torch" in message
    assert message.endswith("model.py is served instead.")


def test_package_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged package fails the load with the version of torch and what to do."""
    store_package(tmp_path)
    monkeypatch.setattr(aotinductor, "mismatch", lambda path, device: "")

    with pytest.raises(ArtifactError) as raised:
        load(tmp_path)

    text = str(raised.value)
    assert f"model.pt2 is an AOTInductor package that torch {torch.__version__} cannot" in text
    assert "parameter FALLBACK" in text
    assert str(tmp_path) not in text


def test_code_takes_any_number_of_rows(tmp_path: Path) -> None:
    """Only programs have row limits."""
    store(tmp_path, state=STATE)

    assert load(tmp_path).rows == ANY_ROWS


def test_each_kind_has_a_loader() -> None:
    """Each kind of artifact has a loader."""
    assert set(registry.LOADERS) == set(ArtifactType)


# --- streams ---------------------------------------------------------------------------------

_STEPS = (
    "def begin(self, {0}):\n        return {0}\n\n    def step(self, states):\n        return []"
)
_STREAMS = {
    "generator": "def forward(self, x):\n        yield x",
    "asynchronous": "async def forward(self, x):\n        yield x",
    "steps": _STEPS.format("x"),
    "both": f"def forward(self, x):\n        return x\n\n    {_STEPS.format('y')}",
    "plain": "def forward(self, x):\n        return x",
}


def _streaming(folder: Path, which: str, **overrides: Any) -> Loaded:
    text = f"from torch import nn\n\n\nclass Net(nn.Module):\n    {_STREAMS[which]}\n"
    build.write(folder, "model.py", text)
    settings = build.config(folder, **overrides)
    return registry.load(discovery.find(settings), settings, CPU)


@pytest.mark.parametrize(
    ("which", "takes", "steps", "streams"),
    [
        ("generator", "forward(x)", False, True),
        ("asynchronous", "forward(x)", False, True),
        ("steps", "begin(x)", True, True),
        ("both", "begin(y)", True, True),
        ("plain", "forward(x)", False, False),
    ],
)
def test_decoupled_models(
    which: str, takes: str, steps: bool, streams: bool, tmp_path: Path
) -> None:
    """A decoupled model is served through begin() and step(), or through forward()."""
    loaded = _streaming(tmp_path, which, decoupled=True)
    assert str(loaded.signature) == takes
    assert (loaded.step is not None) is steps
    assert loaded.streams is streams


@pytest.mark.parametrize("which", ["generator", "asynchronous", "steps"])
def test_streams_in_a_model_that_is_not_decoupled(which: str, tmp_path: Path) -> None:
    """A streaming model that is not decoupled is refused with what to write."""
    with pytest.raises(ConfigError, match=r"is not decoupled.*decoupled: true"):
        _streaming(tmp_path, which)


@pytest.mark.parametrize("which", ["both", "plain"])
def test_forward_beside_steps(which: str, tmp_path: Path) -> None:
    """Without decoupling forward() is served, also beside begin() and step()."""
    loaded = _streaming(tmp_path, which)
    assert str(loaded.signature) == "forward(x)"
    assert loaded.step is None


def test_method_rather_than_steps(tmp_path: Path) -> None:
    """METHOD takes precedence over begin() and step()."""
    loaded = _streaming(tmp_path, "both", decoupled=True, method="forward")
    assert str(loaded.signature) == "forward(x)"
    assert loaded.step is None


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"decoupled": True}, "the model is decoupled, and model.mar is a TorchServe archive"),
        (
            {"sequencing": sequence_config.parse("digits", {"sequence_batching": {}}, None)},
            "config.pbtxt has sequence_batching, and model.mar is a TorchServe archive",
        ),
    ],
    ids=["decoupled", "sequences"],
)
def test_handlers_answer_once(overrides: dict[str, Any], says: str) -> None:
    """A handler of TorchServe supports neither streams nor sequences."""
    archive = Artifact(ArtifactType.TORCHSERVE, Path("/models/digits/1/model.mar"))
    with pytest.raises(ConfigError, match=says):
        registry.load(archive, build.config(**overrides), None)


# --- options for modules only ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["script", "function"])
def test_device_map_without_a_module(kind: str, tmp_path: Path) -> None:
    """DEVICE_MAP is refused for programs and functions."""
    if kind == "script":
        store_script(tmp_path, scripted())
        found = "the model is TorchScript"
    else:
        store(tmp_path, "def double(x):\n    return 2 * x\n")
        found = "what model.py serves is a function"

    with pytest.raises(ConfigError, match=f"DEVICE_MAP is set, and {found}; expected a model"):
        load(tmp_path, None, device_map={"": "cpu"})


def test_module_with_a_device_map(tmp_path: Path) -> None:
    """METHOD is called through the device map, and the weights stay mapped."""
    store(tmp_path, state=STATE)

    loaded = load(tmp_path, None, device_map={"linear": "cpu", "offset": "cpu"})

    assert torch.equal(loaded.module(X), Y)
    assert not isinstance(loaded.module, nn.Module)
    assert [one.name for one in loaded.signature.arguments] == ["x"]
