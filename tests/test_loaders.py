import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build
import pytest
import torch
from torch import Tensor, nn

from torch_py_backend import artifacts, loaders
from torch_py_backend.artifacts import Kind
from torch_py_backend.binding import Argument, Passing
from torch_py_backend.errors import ArtifactError, LoadError, SourceError, WeightsError
from torch_py_backend.loaders import Loaded

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
    """As in the source above."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.dropout = nn.Dropout(0.99)
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.linear(x)) + self.offset
        return result


class WithDefaults(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None, scale: float = 2.0) -> Tensor:
        return x * scale if y is None else y


class TakesDict(nn.Module):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return x["a"]


class TakesList(nn.Module):
    def forward(self, x: list[Tensor]) -> Tensor:
        return x[0]


class WithKeyword(nn.Module):
    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x * scale


class OnlyEncodes(nn.Module):
    """Has a method, and no forward()."""

    @torch.jit.export
    def encode(self, x: Tensor) -> Tensor:
        return x


@pytest.fixture(autouse=True)
def imports() -> Iterator[None]:
    """Puts back what Python knows of modules and where it looks for them."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def load(folder: Path, device: torch.device | None = CPU, **options: Any) -> Loaded:
    config = build.config(folder, **options)
    return loaders.load(artifacts.find(config), config, device)


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
    """A source becomes a module with its weights, in eval mode, that records no gradients."""
    store(tmp_path, state=STATE)

    loaded = load(tmp_path)

    assert isinstance(loaded.module, nn.Module)
    assert torch.equal(loaded.module(X), Y)  # without eval(), dropout would clear nearly all
    assert not any(part.training for part in loaded.module.modules())
    assert not any(tensor.requires_grad for tensor in loaded.weights)
    assert [one.name for one in loaded.arguments] == ["x"]


def test_weights_are_parameters_and_buffers(tmp_path: Path) -> None:
    """What a model holds is known, for finding its device."""
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
    """A module goes where its instance runs; without a device it stays where it was built."""
    store(tmp_path, state=STATE)

    assert {tensor.device.type for tensor in load(tmp_path, device).weights} == {found}


def test_module_that_places_itself_stays_there(tmp_path: Path) -> None:
    """With KIND_MODEL the module's own placement holds."""
    store(tmp_path, NET + "def make():\n    return Net().to('meta')\n")

    loaded = load(tmp_path, device=None, model_factory="make", weights="none")

    assert {tensor.device.type for tensor in loaded.weights} == {"meta"}


def test_module_without_its_weights_is_refused(tmp_path: Path) -> None:
    """Random numbers are not served."""
    store(tmp_path)

    with pytest.raises(ArtifactError, match="Net has 3 weights, and no file"):
        load(tmp_path)


def test_weights_of_another_class_are_refused(tmp_path: Path) -> None:
    """A file that lacks a weight fails the load."""
    store(tmp_path, state={"linear.weight": STATE["linear.weight"]})

    with pytest.raises(WeightsError, match=r"missing keys \(2\)"):
        load(tmp_path)


def test_module_may_be_served_as_it_is_built(tmp_path: Path) -> None:
    """With WEIGHTS none the constructor's own values are served, whatever lies beside it."""
    store(tmp_path, state=STATE)

    loaded = load(tmp_path, weights="none")

    assert torch.equal(loaded.weights[-1], torch.ones(3))


def test_module_without_weights_needs_no_file(tmp_path: Path) -> None:
    """A module that holds nothing is served from its source alone."""
    store(tmp_path, "from torch import nn\nclass Net(nn.ReLU): ...\n")

    loaded = load(tmp_path)

    assert loaded.weights == ()
    assert torch.equal(loaded.module(-X), torch.zeros(1, 2))


def test_function_is_served(tmp_path: Path) -> None:
    """A function needs no module and no weights."""
    store(tmp_path, "def double(x, factor=2):\n    return factor * x\n")

    loaded = load(tmp_path)

    assert loaded.module(4) == 8
    assert loaded.weights == ()
    assert [one.name for one in loaded.arguments] == ["x", "factor"]


def test_callable_object_is_served(tmp_path: Path) -> None:
    """A class that is no module is built, and served if it can be called."""
    store(tmp_path, "class Scaled:\n    def __call__(self, x):\n        return 3 * x\n")

    assert load(tmp_path, model_class="Scaled").module(2) == 6


def test_weights_beside_a_function_are_refused(tmp_path: Path) -> None:
    """A file that would be ignored is told."""
    store(tmp_path, "def double(x):\n    return 2 * x\n", state=STATE)

    with pytest.raises(ArtifactError) as raised:
        load(tmp_path)

    assert "model 'digits': model.pt lies beside a function" in str(raised.value)
    assert 'set the parameter WEIGHTS to "none"' in str(raised.value)
    assert load(tmp_path, weights="none").module(4) == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"model_factory": "make"}, "what model.py builds is a int", id="factory"),
        pytest.param({"model_class": "Size"}, "what model.py builds is a Size", id="class"),
    ],
)
def test_what_cannot_be_called_is_refused(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """What is built must be a module or a function."""
    store(tmp_path, "def make():\n    return 3\nclass Size: ...\n")

    with pytest.raises(SourceError) as raised:
        load(tmp_path, **options)

    assert f"model 'digits': {said}" in str(raised.value)
    assert "expected a torch.nn.Module or a function" in str(raised.value)


def test_factory_may_return_torchscript(tmp_path: Path) -> None:
    """A factory that scripts its module is served like one that does not."""
    store(tmp_path, NET + "def make():\n    return torch.jit.script(Net())\n")

    loaded = load(tmp_path, model_factory="make", weights="none")

    assert [one.name for one in loaded.arguments] == ["x"]
    assert loaded.module(X).shape == (1, 3)


def test_what_has_no_signature_is_refused(tmp_path: Path) -> None:
    """A built-in function whose arguments Python cannot tell is refused."""
    store(tmp_path, "from torch import relu\n")

    with pytest.raises(SourceError, match="'digits': the arguments of what is served cannot be"):
        load(tmp_path, model_class="relu")


SIGNATURES = [
    pytest.param("x", [("x", True, Passing.POSITIONAL, "x")], id="plain"),
    pytest.param(
        "x, y=None",
        [("x", True, Passing.POSITIONAL, "x"), ("y", False, Passing.POSITIONAL, "y=None")],
        id="default",
    ),
    pytest.param(
        "x, /, *, y, z=1",
        [
            ("x", True, Passing.POSITIONAL, "x"),
            ("y", True, Passing.KEYWORD, "y"),
            ("z", False, Passing.KEYWORD, "z=1"),
        ],
        id="keyword-only",
    ),
    pytest.param("*xs", [("xs", False, Passing.REST, "*xs")], id="*"),
    pytest.param("**xs", [("xs", False, Passing.REST_BY_NAME, "**xs")], id="**"),
    pytest.param("x: int = 3", [("x", False, Passing.POSITIONAL, "x: int = 3")], id="annotated"),
    pytest.param("", [], id="none"),
]


@pytest.mark.parametrize("served", ["function", "module"])
@pytest.mark.parametrize(("signature", "arguments"), SIGNATURES)
def test_arguments_are_those_of_the_signature(
    served: str,
    signature: str,
    arguments: list[tuple[str, bool, Passing, str]],
    tmp_path: Path,
) -> None:
    """A function and a forward() are asked for their arguments, less `self`."""
    source = f"def forward({signature}): ...\n"
    if served == "module":
        separator = ", " if signature else ""
        source = (
            "from torch import nn\nclass Net(nn.Module):\n"
            f"    def forward(self{separator}{signature}): ...\n"
        )
    store(tmp_path, source)

    assert load(tmp_path).arguments == tuple(
        Argument(name, required, passing, takes_dict=False, text=text)
        for name, required, passing, text in arguments
    )


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"], ids=["", "future"])
@pytest.mark.parametrize(
    ("annotation", "takes_dict"),
    [
        ("dict", True),
        ("dict[str, Tensor]", True),
        ("Dict[str, Tensor]", True),
        ("typing.Dict[str, Tensor]", True),
        ("Mapping[str, Tensor]", True),
        ("collections.abc.Mapping[str, Tensor]", True),
        ("Tensor", False),
        ("list[Tensor]", False),
        ("DictLike", False),
        ("Optional[Tensor]", False),
    ],
)
def test_dict_of_tensors_is_told_by_its_annotation(
    annotation: str, takes_dict: bool, future: str, tmp_path: Path
) -> None:
    """An argument that is annotated as a dict takes all inputs; its likes in name do not."""
    store(
        tmp_path,
        f"{future}import collections.abc\nimport typing\n"
        "from collections.abc import Mapping\nfrom typing import Dict, Optional\n"
        "from torch import Tensor\nclass DictLike: ...\n"
        f"def predict(x: {annotation}): ...\n",
    )

    (argument,) = load(tmp_path).arguments
    assert argument.takes_dict is takes_dict


@pytest.mark.parametrize("stars", ["*", "**"])
def test_annotated_rest_takes_no_dict(stars: str, tmp_path: Path) -> None:
    """The annotation of *args and **kwargs is that of each of them."""
    store(tmp_path, f"def predict({stars}x: dict): ...\n")

    (argument,) = load(tmp_path).arguments
    assert not argument.takes_dict


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
    """TorchScript is loaded in eval mode, however it was made."""
    store_script(tmp_path, make())

    loaded = load(tmp_path)

    assert torch.equal(loaded.module(X), Y)
    assert [(one.name, one.required, one.passing) for one in loaded.arguments] == [
        ("x", True, Passing.POSITIONAL)
    ]


def test_torchscript_has_weights(tmp_path: Path) -> None:
    """Parameters and buffers of TorchScript are known like a module's."""
    store_script(tmp_path, scripted())

    assert sorted(tensor.sum().item() for tensor in load(tmp_path).weights) == [15.0, 60.0, 300.0]


@pytest.mark.parametrize(("device", "found"), [(CPU, "cpu"), (META, "meta"), (None, "cpu")])
def test_torchscript_is_loaded_onto_its_device(
    device: torch.device | None, found: str, tmp_path: Path
) -> None:
    """TorchScript goes where its instance runs, wherever it was saved."""
    store_script(tmp_path, scripted())

    assert {tensor.device.type for tensor in load(tmp_path, device).weights} == {found}


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        pytest.param(
            WithDefaults(),
            [
                ("x", True, Passing.POSITIONAL, False, "Tensor x"),
                ("y", False, Passing.POSITIONAL, False, "Tensor? y"),
                ("scale", False, Passing.POSITIONAL, False, "float scale"),
            ],
            id="defaults",
        ),
        pytest.param(
            TakesDict(), [("x", True, Passing.POSITIONAL, True, "Dict(str, Tensor) x")], id="dict"
        ),
        pytest.param(
            TakesList(), [("x", True, Passing.POSITIONAL, False, "Tensor[] x")], id="list"
        ),
        pytest.param(
            WithKeyword(),
            [
                ("x", True, Passing.POSITIONAL, False, "Tensor x"),
                # A saved schema has lost the star; the argument is taken by position as well.
                ("scale", True, Passing.POSITIONAL, False, "float scale"),
            ],
            id="keyword-only",
        ),
    ],
)
def test_torchscript_tells_its_arguments(
    module: nn.Module, arguments: list[tuple[str, bool, Passing, bool, str]], tmp_path: Path
) -> None:
    """The schema that TorchScript carries says what forward() takes."""
    store_script(tmp_path, torch.jit.script(module))

    assert load(tmp_path).arguments == tuple(Argument(*facts) for facts in arguments)


def test_torchscript_without_forward_is_refused(tmp_path: Path) -> None:
    """TorchScript that has other methods only cannot be called."""
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
def test_torchscript_that_cannot_be_loaded_is_told(
    member: str, old: bytes, new: bytes | None, tmp_path: Path
) -> None:
    """TorchScript that this torch cannot read fails the load with torch's version and reason."""
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


def test_each_kind_has_a_loader() -> None:
    """No kind of artifact can be found that cannot be loaded."""
    assert set(loaders._LOADERS) == set(Kind)
