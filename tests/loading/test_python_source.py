import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import build
import pytest
import torch
from torch import nn

from torch_py_backend.errors import LoadError, SourceError
from torch_py_backend.loading import python_source

NET = """
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        return x + 1
"""
SIZED = """
from torch import nn

class Net(nn.Module):
    def __init__(self, size, *, bias=True):
        super().__init__()
        self.linear = nn.Linear(size, 1, bias=bias)

    def forward(self, x):
        return self.linear(x)
"""


@pytest.fixture(autouse=True)
def imports(tmp_path: Path) -> Iterator[None]:
    """Restore sys.modules and sys.path after the test."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def constructed(folder: Path, source: str | bytes, **options: Any) -> Any:
    """The object that a source in version 1 defines, with these options."""
    path = build.write(folder, "model.py", source)
    imported = python_source.import_source(build.MODEL, path)
    return python_source.construct(build.config(folder, **options), path, imported, filled=False)


# --- what is served --------------------------------------------------------------------------


def test_only_class_is_served(tmp_path: Path) -> None:
    """The only nn.Module of a file is served, whatever its name."""
    module = constructed(tmp_path, NET)

    assert isinstance(module, nn.Module)
    assert type(module).__name__ == "Net"
    assert module(1) == 2


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            NET + "from torch.nn import Conv2d, Linear, Module, Sequential\n", id="imported classes"
        ),
        pytest.param(NET + "def helper(x):\n    return x\n", id="functions beside it"),
        pytest.param(NET + "class Config:\n    size = 3\n", id="classes of another kind"),
        pytest.param(NET + "class _Part(nn.Module):\n    pass\n", id="private modules"),
        pytest.param(NET + "net = Net()\nlinear = nn.Linear(1, 1)\n", id="instances"),
    ],
)
def test_other_names_of_the_file(source: str, tmp_path: Path) -> None:
    """Imports, functions, other classes and private names are not candidates."""
    assert type(constructed(tmp_path, source)).__name__ == "Net"


def test_imported_class_is_not_served(tmp_path: Path) -> None:
    """An imported class is not served by default."""
    with pytest.raises(SourceError) as raised:
        constructed(tmp_path, "from torch.nn import Conv2d, Linear\n")

    assert str(raised.value) == (
        "model 'digits': model.py defines no nn.Module and no function; expected one class derived"
        " from torch.nn.Module, or one function."
    )


def test_imported_class_can_be_named(tmp_path: Path) -> None:
    """A class of a file beside model.py is served only if it is named."""
    build.write(tmp_path, "sibling_with_a_class.py", NET)
    source = "from sibling_with_a_class import Net\n"

    with pytest.raises(SourceError, match=r"defines no nn\.Module"):
        constructed(tmp_path, source)
    assert constructed(tmp_path, source, model_class="Net")(1) == 2


@pytest.fixture
def stub_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's file, which Triton's stub imports as `model`."""
    backend = ModuleType("model")
    backend.__file__ = "/opt/tritonserver/backends/pytorch_py/model.py"
    monkeypatch.setitem(sys.modules, "model", backend)


def test_a_sibling_named_model_is_imported(tmp_path: Path, stub_module: None) -> None:
    """`import model` imports the model's own module, not the backend's file."""
    build.write(tmp_path, "model.py", NET)
    path = build.write(tmp_path, "served.py", "from model import Net\n")
    config = build.config(tmp_path, model_class="Net")

    imported = python_source.import_source(build.MODEL, path)

    assert python_source.construct(config, path, imported, filled=False)(1) == 2


def test_a_factory_in_a_module_named_model(tmp_path: Path, stub_module: None) -> None:
    """MODEL_FACTORY may name a class of the model's own module `model`."""
    config = build.config(tmp_path, model_factory="model:Net")
    build.write(tmp_path, "model.py", NET)

    assert python_source.construct_from_package(config, filled=False).served(1) == 2


def test_only_function_is_served(tmp_path: Path) -> None:
    """The only function of a file without modules is served."""
    function = constructed(
        tmp_path, "import math\nfrom os import getcwd\ndef double(x):\n    return 2 * x\n"
    )

    assert function.__name__ == "double"
    assert function(4) == 8


def test_class_is_named(tmp_path: Path) -> None:
    """MODEL_CLASS names one of several classes."""
    source = NET + "class Other(Net):\n    def forward(self, x):\n        return x + 2\n"

    assert constructed(tmp_path, source, model_class="Net")(1) == 2
    assert constructed(tmp_path, source, model_class="Other")(1) == 3


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        pytest.param("class Later(Net):\n    pass\n", 2, id="defined"),
        pytest.param(
            "class First(Net):\n    def forward(self, x):\n        return x + 2\n", 3, id="earlier"
        ),
    ],
)
def test_several_classes_for_the_python_runtime(
    tmp_path: Path, source: str, answer: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The class that Triton's Python runtime would choose is served."""
    module = constructed(tmp_path, NET + source, python_runtime=True)

    assert module(1) == answer
    assert "is served, the first in the alphabet" in caplog.text


def test_imported_class_for_the_python_runtime(tmp_path: Path) -> None:
    """The only class may be imported from a file beside model.py."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "runtime_layers.py").write_text(NET, encoding="utf-8")

    module = constructed(tmp_path, "from runtime_layers import Net\n", python_runtime=True)

    assert module(1) == 2


def test_private_class_can_be_named(tmp_path: Path) -> None:
    """A private class is served only if it is named."""
    module = constructed(tmp_path, NET.replace("Net", "_Net"), model_class="_Net")

    assert module(1) == 2


def test_function_is_named(tmp_path: Path) -> None:
    """MODEL_CLASS may name a function, also beside a module."""
    source = NET + "def double(x):\n    return 2 * x\n"

    assert constructed(tmp_path, source, model_class="double")(4) == 8


def test_built_module_is_named(tmp_path: Path) -> None:
    """MODEL_CLASS may name a module object, which is not called."""
    module = constructed(tmp_path, NET + "served = nn.Identity()\n", model_class="served")

    assert isinstance(module, nn.Identity)


def test_factory_is_called_once(tmp_path: Path) -> None:
    """MODEL_FACTORY names a function whose result is served."""
    source = (
        SIZED + "calls = []\ndef make():\n    calls.append(1)\n    return Net(size=len(calls))\n"
    )

    module = constructed(tmp_path, source, model_factory="make")

    assert module.linear.in_features == 1


def test_factory_may_return_a_function(tmp_path: Path) -> None:
    """A factory may return a function."""
    source = "def make(offset):\n    return lambda x: x + offset\n"

    function = constructed(tmp_path, source, model_factory="make", model_kwargs={"offset": 5})

    assert function(1) == 6


@pytest.mark.parametrize("option", ["model_class", "model_factory"])
def test_keyword_arguments_reach_class_and_factory(option: str, tmp_path: Path) -> None:
    """MODEL_KWARGS are the keyword arguments of the class or the factory."""
    source = SIZED + "def make(size, bias):\n    return Net(size, bias=bias)\n"
    name = "Net" if option == "model_class" else "make"

    module = constructed(
        tmp_path, source, model_kwargs={"size": 3, "bias": False}, **{option: name}
    )

    assert module.linear.in_features == 3
    assert module.linear.bias is None


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        pytest.param("", {}, ["defines no nn.Module and no function"], id="empty file"),
        pytest.param("x = 1\n", {}, ["defines no nn.Module and no function"], id="only values"),
        pytest.param(
            NET + "class Other(nn.Module): ...\n",
            {},
            ["model.py defines Net, Other; expected one class", "parameter MODEL_CLASS"],
            id="two classes",
        ),
        pytest.param(
            "def a(x): ...\ndef b(x): ...\n",
            {},
            ["model.py defines a, b; expected", "or one function", "parameter MODEL_CLASS"],
            id="two functions",
        ),
        pytest.param(
            NET + "def make(): ...\n",
            {"model_class": "Nett"},
            ["MODEL_CLASS is 'Nett', which model.py does not define", "one of Net, make"],
            id="unknown class",
        ),
        pytest.param(
            NET + "def make(): ...\n",
            {"model_factory": "build"},
            ["MODEL_FACTORY is 'build', which model.py does not define", "one of Net, make"],
            id="unknown factory",
        ),
        pytest.param(
            "",
            {"model_class": "Net"},
            ["which model.py does not define", "its classes or functions"],
            id="nothing to name",
        ),
        pytest.param(
            NET, {"model_class": "nn"}, ["MODEL_CLASS is 'nn', which"], id="a module of Python"
        ),
        pytest.param(
            NET, {"model_class": "nn.Identity"}, ["MODEL_CLASS is 'nn.Identity'"], id="dotted name"
        ),
        pytest.param(
            "def double(x): ...\n",
            {"model_kwargs": {"factor": 3}},
            ["MODEL_KWARGS is set, and double, which", "with MODEL_FACTORY"],
            id="keyword arguments for a function",
        ),
    ],
)
def test_unclear_choice_is_refused(
    source: str, options: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    """No candidate, or several, are an error that names them."""
    with pytest.raises(SourceError) as raised:
        constructed(tmp_path, source, **options)

    assert isinstance(raised.value, LoadError)
    assert str(raised.value).startswith("model 'digits': ")
    assert all(part in str(raised.value) for part in said)


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        pytest.param(
            SIZED,
            {},
            ["Net(size, *, bias=True) in model.py cannot be called with no arguments", "'size'"],
            id="argument missing",
        ),
        pytest.param(
            SIZED,
            {"model_kwargs": {"size": 2, "width": 3}},
            ["cannot be called with {'size': 2, 'width': 3}", "'width'"],
            id="argument unknown",
        ),
        pytest.param(
            NET + "def make(size): ...\n",
            {"model_factory": "make"},
            ["make(size) in model.py cannot be called with no arguments", "'size'"],
            id="factory",
        ),
        pytest.param(
            SIZED + "import functools\nmake = functools.partial(Net, bias=False)\n",
            {"model_factory": "make"},
            ["make(size, *, bias=False) in model.py cannot be called with no arguments", "'size'"],
            id="partial",
        ),
    ],
)
def test_wrong_arguments(
    source: str, options: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    """The error shows the signature of the constructor, and the parameter."""
    with pytest.raises(SourceError) as raised:
        constructed(tmp_path, source, **options)

    assert str(raised.value).startswith("model 'digits': ")
    assert all(part in str(raised.value) for part in said)
    assert "Give its arguments as JSON in the parameter MODEL_KWARGS." in str(raised.value)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        pytest.param(
            "functools.partial(Net, 1, 2, 3)", "make() in model.py fails at", id="partial"
        ),
        pytest.param("max", "make() in model.py fails at TypeError: max expected", id="built-in"),
    ],
)
def test_factory_without_a_signature_fails_when_it_is_called(
    factory: str, said: str, tmp_path: Path
) -> None:
    """A factory without a signature is called, and its error is reported."""
    source = f"import functools\n{SIZED}make = {factory}\n"

    with pytest.raises(SourceError) as raised:
        constructed(tmp_path, source, model_factory="make")

    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        pytest.param("raise ValueError('too small')", "line 4: ValueError: too small", id="raise"),
        pytest.param("self.x = 1 / 0", "line 4: ZeroDivisionError: division by zero", id="divide"),
        pytest.param("raise SystemExit(2)", "line 4: SystemExit: 2", id="exit"),
        pytest.param(
            "nn.Linear('a', 1)", "line 4: TypeError: ", id="in torch, called from this line"
        ),
        pytest.param(
            "open('/nowhere/secret/a.txt')", "line 4: FileNotFoundError: ", id="file missing"
        ),
    ],
)
def test_error_of_a_constructor(body: str, said: str, tmp_path: Path) -> None:
    """The error of a constructor has the line of model.py, and no folders."""
    source = (
        f"from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        {body}\n"
    )

    with pytest.raises(SourceError) as raised:
        constructed(tmp_path, source)

    text = str(raised.value)
    assert f"model 'digits': Net() in model.py fails at {said}" in text
    assert "/nowhere/secret" not in text
    assert raised.value.__cause__ is not None


# --- the import ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "said"),
    [
        pytest.param(
            "x = 1\ny = (\n", "line 2: SyntaxError: '(' was never closed: y = (", id="syntax"
        ),
        pytest.param("if True:\nx = 1\n", "line 2: SyntaxError: expected an indented", id="indent"),
        pytest.param("x = 1\n\nz = y\n", "line 3: NameError: name 'y' is not defined", id="name"),
        pytest.param(
            "import not_a_module_of_ours\n",
            "line 1: ModuleNotFoundError: No module named 'not_a_module_of_ours'",
            id="import",
        ),
        pytest.param("import sys\nsys.exit('enough')\n", "line 2: SystemExit: enough", id="exit"),
        pytest.param(
            "def f():\n    raise OSError('inner')\n\nf()\n", "line 2: OSError: inner", id="function"
        ),
        pytest.param(b"x = 1\ny = '\xff'\n", "SyntaxError: ", id="not UTF-8"),
        pytest.param(b"x = 1\n\x00\n", "source code string cannot contain null bytes", id="null"),
    ],
)
def test_error_of_an_import(source: str | bytes, said: str, tmp_path: Path) -> None:
    """The error of an import has the line of model.py."""
    with pytest.raises(SourceError) as raised:
        constructed(tmp_path, source)

    assert "model 'digits': model.py fails at " in str(raised.value)
    assert said in str(raised.value)
    assert "None" not in str(raised.value)
    assert str(tmp_path) not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "sibling", "said"),
    [
        pytest.param(
            "sibling_that_divides",
            "x = 1\n\ny = 1 / 0\n",
            "model.py fails at line 2: ZeroDivisionError: division by zero",
            id="exception",
        ),
        pytest.param(
            "sibling_with_wrong_syntax",
            "x = 1\n\n\n\ny = (\n",
            "model.py fails at line 2: SyntaxError: '(' was never closed"
            " (sibling_with_wrong_syntax.py, line 5)",
            id="syntax",
        ),
    ],
)
def test_error_of_an_imported_file(name: str, sibling: str, said: str, tmp_path: Path) -> None:
    """An error in a file beside model.py has the line of model.py that imports it."""
    build.write(tmp_path, f"{name}.py", sibling)

    with pytest.raises(SourceError) as raised:
        constructed(tmp_path, f"import os\nimport {name}\n")

    assert said in str(raised.value)


def test_siblings_can_be_imported(tmp_path: Path) -> None:
    """Files and packages beside model.py can be imported, also later."""
    build.write(tmp_path, "sibling_number.py", "NUMBER = 3\n")
    build.write(tmp_path, "sibling_package/__init__.py", "from .inner import NUMBER\n")
    build.write(tmp_path, "sibling_package/inner.py", "NUMBER = 4\n")
    source = (
        "from sibling_number import NUMBER\n"
        "def add(x):\n"
        "    from sibling_package import NUMBER as later\n"
        "    return x + NUMBER + later\n"
    )

    assert constructed(tmp_path, source)(1) == 8


def test_two_models(tmp_path: Path) -> None:
    """Each model.py is a separate module."""
    first = constructed(tmp_path / "a", NET)
    second = constructed(tmp_path / "b", NET.replace("+ 1", "+ 2"))

    assert (first(1), second(1)) == (2, 3)
    assert type(first) is not type(second)


def test_module_can_be_found_by_its_name(tmp_path: Path) -> None:
    """The module is in sys.modules, for dataclasses, pickles and torch.compile."""
    source = "import dataclasses\n" + NET + "@dataclasses.dataclass\nclass Size:\n    x: 'int'\n"

    module = constructed(tmp_path, source)

    assert sys.modules[type(module).__module__].Net is type(module)


def test_repository_is_not_written_to(tmp_path: Path) -> None:
    """An import writes no bytecode to the model repository."""
    build.write(tmp_path, "sibling_to_compile.py", "X = 1\n")
    before = sys.dont_write_bytecode

    constructed(tmp_path, "import sibling_to_compile\n" + NET)

    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == [
        "model.py",
        "sibling_to_compile.py",
    ]
    assert sys.dont_write_bytecode is before


def test_source_is_read_as_utf8(tmp_path: Path) -> None:
    """A source is read as UTF-8, whatever the encoding of the server."""
    assert constructed(tmp_path, "def grüße(x):\n    return 'ä' + x\n")("ö") == "äö"


def test_real_model_runs(tmp_path: Path) -> None:
    """A constructed model computes."""
    module = constructed(tmp_path, SIZED, model_kwargs={"size": 2})

    assert module(torch.ones(3, 2)).shape == (3, 1)


# --- packages --------------------------------------------------------------------------------

PACKAGE = """
import os
from torch import nn

class Net(nn.Module):
    def __init__(self, size=1, *, bias=True):
        super().__init__()
        self.linear = nn.Linear(size, 1, bias=bias)

class Namespace:
    @staticmethod
    def make(offset):
        return lambda x: x + offset

class Pretrained(nn.Module):
    def __init__(self, **keywords):
        super().__init__()
        self.seen = ("built", keywords)

    @classmethod
    def from_pretrained(cls, folder, **keywords):
        made = cls()
        made.seen = (folder, keywords, os.environ.get("HF_HUB_OFFLINE"))
        return made

def broken():
    raise ValueError("see /srv/secret/place/readme.txt")

def leaving():
    raise SystemExit(3)

number = 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an importable package of one module."""
    name = "installed_package"
    (tmp_path / "site" / name).mkdir(parents=True)
    (tmp_path / "site" / name / "__init__.py").write_text("")
    (tmp_path / "site" / name / "models.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return f"{name}.models"


def built(folder: Path, factory: str, **options: Any) -> python_source.Built:
    folder.mkdir(exist_ok=True)
    settings = build.config(folder, model_factory=factory, **options)
    return python_source.construct_from_package(settings, filled=False)


def test_class_of_a_package_is_built(package: str, tmp_path: Path) -> None:
    """`package.module:Class` is called with MODEL_KWARGS, and has no weights yet."""
    found = built(tmp_path / "digits", f"{package}:Net", model_kwargs={"size": 5, "bias": False})

    assert found.served.linear.in_features == 5
    assert found.served.linear.bias is None
    assert not found.has_weights


def test_name_within_a_class_is_found(package: str, tmp_path: Path) -> None:
    """The name after the colon may have dots."""
    factory = f"{package}:Namespace.make"

    assert built(tmp_path / "digits", factory, model_kwargs={"offset": 5}).served(1) == 6


def test_factory_in_the_version_folder(tmp_path: Path) -> None:
    """MODEL_FACTORY may name a module in the version folder."""
    build.write(tmp_path / "digits", "sibling_as_a_package.py", PACKAGE)

    assert built(tmp_path / "digits", "sibling_as_a_package:Net").served.linear.in_features == 1


@pytest.mark.parametrize(
    ("files", "found"),
    [
        pytest.param(["1/config.json"], "1", id="version folder"),
        pytest.param(["config.json"], "", id="model folder"),
        pytest.param(["1/config.json", "config.json"], "1", id="version before model"),
    ],
)
def test_from_pretrained(files: list[str], found: str, package: str, tmp_path: Path) -> None:
    """from_pretrained() gets the folder with config.json, and no network."""
    folder = tmp_path / "digits"
    (folder / "1").mkdir(parents=True)
    for name in files:
        (folder / name).write_text("{}")

    made = built(folder, f"{package}:Pretrained", model_kwargs={"revision": "a"})

    assert made.has_weights
    assert made.served.seen == (
        str(folder / found),
        {"local_files_only": True, "revision": "a"},
        "1",
    )


def test_from_pretrained_without_a_config(package: str, tmp_path: Path) -> None:
    """Without a config.json the class is called."""
    made = built(tmp_path / "digits", f"{package}:Pretrained", model_kwargs={"a": 1})

    assert not made.has_weights
    assert made.served.seen == ("built", {"a": 1})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("{package}:Missing", "has no attribute 'Missing'", id="name"),
        pytest.param("{package}.nothing:Net", "No module named", id="module"),
        pytest.param(
            "not_installed_here:Net", "No module named 'not_installed_here'", id="package"
        ),
        pytest.param("{package}:", "cannot be imported", id="no name"),
        pytest.param(":Net", "cannot be imported", id="no package"),
        pytest.param("{package}:Net:make", "cannot be imported", id="two colons"),
        pytest.param("broken_on_import:Net", "ZeroDivisionError: division by zero", id="broken"),
        pytest.param(
            "leaving_on_import:Net",
            "SystemExit: 3",
            id="exits",
        ),
    ],
)
def test_factory_that_cannot_be_imported(
    name: str, said: str, package: str, tmp_path: Path
) -> None:
    """A missing or failing factory is an error with its reason."""
    (tmp_path / "site" / "broken_on_import.py").write_text("1 / 0\n")
    (tmp_path / "site" / "leaving_on_import.py").write_text("raise SystemExit(3)\n")
    name = name.format(package=package)

    with pytest.raises(SourceError) as raised:
        built(tmp_path / "digits", name)

    assert f"'digits': MODEL_FACTORY is '{name}', which cannot be imported: " in str(raised.value)
    assert said in str(raised.value)
    assert "package.module:callable" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        pytest.param(
            "broken", {}, "with no arguments fails: ValueError: see readme.txt", id="raises"
        ),
        pytest.param("leaving", {}, "fails: SystemExit: 3", id="exits"),
        pytest.param("number", {}, "fails: TypeError: 'int' object is not callable", id="number"),
        pytest.param(
            "Net",
            {"model_kwargs": {"width": 3}},
            "with {'width': 3} fails: TypeError: ",
            id="unknown argument",
        ),
    ],
)
def test_error_of_a_factory(
    name: str, options: dict[str, Any], said: str, package: str, tmp_path: Path
) -> None:
    """The error of a factory has its arguments, and no folders of the server."""
    with pytest.raises(SourceError) as raised:
        built(tmp_path / "digits", f"{package}:{name}", **options)

    assert f"'digits': MODEL_FACTORY '{package}:{name}' " in str(raised.value)
    assert said in str(raised.value)
    assert "MODEL_KWARGS" in str(raised.value)
    assert "/srv/secret" not in str(raised.value)


# --- example_inputs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "served"),
    [
        pytest.param(NET, 2, id="beside a class"),
        pytest.param("def serve(x):\n    return x + 7\n", 8, id="beside a function"),
    ],
)
def test_example_inputs_is_not_a_candidate(source: str, served: int, tmp_path: Path) -> None:
    """The function example_inputs() is not a candidate to serve."""
    examples = "def example_inputs():\n    return {}\n"

    assert constructed(tmp_path, examples + source)(1) == served


def test_example_inputs(tmp_path: Path) -> None:
    """The result of the function in model.py is returned, or None without it."""
    path = build.write(tmp_path, "model.py", NET + "def example_inputs():\n    return {'x': 3}\n")

    assert python_source.example_inputs(build.MODEL, path, "example_inputs") == {"x": 3}
    assert python_source.example_inputs(build.MODEL, path, "missing") is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        pytest.param("return [1]", "example_inputs() in model.py returns a list", id="list"),
        pytest.param("return None", "returns a NoneType; expected a dict of tensors", id="None"),
        pytest.param("return 1 / 0", "fails at line 2: ZeroDivisionError", id="raises"),
        pytest.param("raise SystemExit(3)", "fails at line 2: SystemExit: 3", id="exits"),
    ],
)
def test_wrong_example_inputs(body: str, said: str, tmp_path: Path) -> None:
    """The error of example_inputs() has its line."""
    path = build.write(tmp_path, "model.py", f"def example_inputs():\n    {body}\n")

    with pytest.raises(SourceError) as raised:
        python_source.example_inputs(build.MODEL, path, "example_inputs")

    assert said in str(raised.value)
