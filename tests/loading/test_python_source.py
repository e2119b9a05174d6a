from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import build
import pytest

from torch_py_backend.errors import ArtifactError
from torch_py_backend.loading import python_source
from torch_py_backend.loading.discovery import Artifact, ArtifactType

pytestmark = pytest.mark.usefixtures("imports")
NET = """
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        return x + 1
"""
_RAISES = "from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        "
_FAILS = "Net() in model.py fails at line 4: "
_THREE = f"{NET}    size = 3\n\ndef make():\n    return 3\n"
_DOUBLE = "def double(x):\n    return 2 * x\n"
_EXAMPLES = "def example_inputs(): ...\n"
# Not candidates: functions and parts beside a class, its instances, and another name of it.
BESIDE = f"""
def helper(x): ...
class _Part(nn.Module): ...
net, Alias, linear = Net(), Net, nn.Linear(1, 1)
{_EXAMPLES}"""
# A class that Triton's Python runtime would serve, and its answer to 1.
FIRST = "class First(Net):\n    def forward(self, x):\n        return x + 2\n"


def constructed(folder: Path, source: str | bytes, **options: Any) -> Any:
    artifact = Artifact(ArtifactType.MODULE, build.write(folder, "model.py", source))
    return python_source.load(artifact, build.config(folder, **options), None).module


def refusal(folder: Path, source: str | bytes, **options: Any) -> str:
    with pytest.raises(ArtifactError) as raised:
        constructed(folder, source, **options)
    assert str(folder) not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("source", "options", "answer"),
    [
        (NET + BESIDE, {}, 2),
        (f"import math\nfrom os import getcwd\n{_DOUBLE}{_EXAMPLES}", {}, 2),
        (NET.replace("Net", "_Net"), {"model_class": "_Net"}, 2),
        (NET + _DOUBLE, {"model_class": "double"}, 2),
        (NET + "class Later(Net):\n    pass\n", {"python_runtime": True}, 2),
        (NET + FIRST, {"python_runtime": True}, 3),  # by the alphabet
    ],
    ids=["class", "function", "private", "function by name", "runtime", "runtime, alphabet"],
)
def test_only_class_or_function_is_served_or_the_one_that_an_option_names(
    source: str, options: dict[str, Any], answer: int, tmp_path: Path
) -> None:
    assert constructed(tmp_path, source, **options)(1) == answer


def test_imported_class_is_served_by_its_name_or_to_the_python_runtime(tmp_path: Path) -> None:
    build.write(tmp_path, "sibling_with_a_class.py", NET)
    source = "from sibling_with_a_class import Net\n"
    assert "model.py defines no nn.Module and no function" in refusal(tmp_path, source)
    assert constructed(tmp_path, source, model_class="Net")(1) == 2
    assert constructed(tmp_path, source, python_runtime=True)(1) == 2


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (NET + _DOUBLE, {"model_factory": "build"}, "defines Net, double; expected build. Name"),
        (NET, {"model_class": "nn"}, "model.py defines Net; expected nn."),
        (NET + "net = Net()\n", {"model_class": "net"}, "model.py defines Net; expected net."),
        (_DOUBLE, {"model_kwargs": {"y": 3}}, "double() in model.py fails at TypeError: "),
        (_THREE, {"model_factory": "make"}, "fails at TypeError: 3 is not a callable object"),
        (_THREE, {"method": "decode"}, "fails at AttributeError: 'Net' object has no attribute"),
        (_THREE, {"method": "size"}, "fails at TypeError: 3 is not a callable object"),
        (NET + "class Hooks: ...\n", {}, "Move it to hooks.py"),
        (f"{_RAISES}raise SystemExit(2)\n", {}, f"{_FAILS}SystemExit: 2"),
        (f"{_RAISES}nn.Linear('a', 1)\n", {}, f"{_FAILS}TypeError: "),
        (f"{_RAISES}open('/nowhere/secret/a.txt')\n", {}, f"{_FAILS}FileNotFoundError: "),
        # Errors of an import have the line of model.py, also for a file that it imports.
        ("import sys\nsys.exit('enough')\n", {}, "model.py fails at line 2: SystemExit: enough"),
        (b"x = 1\ny = '\xff'\n", {}, "model.py fails at SyntaxError: (unicode error)"),
        ("import os\nimport dividing\n", {}, "fails at line 2: ZeroDivisionError: division by"),
        ("import os\nimport unclosed\n", {}, "fails at line 2: SyntaxError: '(' was never"),
    ],
)
def test_source_that_is_refused(source: Any, options: Any, message: str, tmp_path: Path) -> None:
    build.write(tmp_path, "dividing.py", "x = 1\n\ny = 1 / 0\n")
    build.write(tmp_path, "unclosed.py", "x = 1\n\n\n\ny = (\n")
    for _ in range(2):  # a file that failed is not taken from sys.modules
        text = refusal(tmp_path, source, **options)
        assert message in text
        assert "/nowhere/secret" not in text


def test_siblings_can_be_imported_also_later_and_no_bytecode_is_written(tmp_path: Path) -> None:
    build.write(tmp_path, "sibling_number.py", "NUMBER = 3\n")
    build.write(tmp_path, "sibling_package/__init__.py", "from .inner import later\n")
    build.write(tmp_path, "sibling_package/inner.py", "later = 4\n")
    later = "    from sibling_package import later\n    return x + NUMBER + later\n"
    source = f"from sibling_number import NUMBER\ndef grüße(x):\n{later}"
    assert constructed(tmp_path, source)(1) == 8
    assert not list(tmp_path.rglob("__pycache__"))


PACKAGE = """
import os
from torch import nn

def net(size=1):
    return nn.Linear(size, 1)

class Namespace:
    @staticmethod
    def make(offset):
        return lambda x: x + offset

class Pretrained:
    def __init__(self, **keywords):
        self.arguments = ("built", keywords)

    @classmethod
    def from_pretrained(cls, folder, **keywords):
        made = cls()
        made.arguments = (folder, keywords, os.environ.get("HF_HUB_OFFLINE"))
        return made

def broken():
    raise ValueError("see /srv/secret/place/readme.txt")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    site = tmp_path / "site" / "installed_package"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("")
    (site / "models.py").write_text(PACKAGE)
    (site / "failing.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return "installed_package"


def built(folder: Path, factory: str, **options: Any) -> tuple[Any, bool]:
    folder.mkdir(exist_ok=True)
    settings = build.config(folder, model_factory=factory, **options)
    artifact = Artifact(ArtifactType.FACTORY, folder / "1")
    return python_source.construct(settings, artifact)


def test_model_factory_names_a_class_of_a_package_or_of_the_version_folder(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ModuleType("model")  # as which Triton's stub imports the backend's file
    backend.__file__ = "/opt/tritonserver/backends/pytorch_py/model.py"
    monkeypatch.setitem(sys.modules, "model", backend)
    folder = tmp_path / "digits"
    build.write(folder, "model.py", PACKAGE)
    size, offset = {"model_kwargs": {"size": 5}}, {"model_kwargs": {"offset": 5}}
    module, has_weights = built(folder, f"{package}.models:net", **size)
    assert module.in_features == 5
    assert not has_weights
    assert built(folder, f"{package}.models:Namespace.make", **offset)[0](1) == 6
    assert built(folder, "model:net")[0].in_features == 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [(["config.json"], ""), (["1/config.json", "config.json"], "1"), ([], None)],
)
def test_from_pretrained_gets_the_folder_with_config_json_and_no_network(
    files: list[str], expected: str | None, package: str, tmp_path: Path
) -> None:
    folder = tmp_path / "digits"
    (folder / "1").mkdir(parents=True)
    for name in files:
        (folder / name).write_text("{}")
    keywords = {"revision": "a"}
    module, filled = built(folder, f"{package}.models:Pretrained", model_kwargs=keywords)
    assert filled is (expected is not None)
    if expected is None:
        assert module.arguments == ("built", keywords)
    else:
        offline = {"local_files_only": True, **keywords}
        assert module.arguments == (str(folder / expected), offline, "1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".models:Missing", "models:Missing() in config.pbtxt fails at AttributeError: "),
        (".failing:net", "fails at ZeroDivisionError: division by zero"),
        (".models:broken", "fails at ValueError: see readme.txt"),
        (".models:net", "Give its arguments as JSON in the parameter MODEL_KWARGS"),
    ],
)
def test_factory_that_fails_is_named_without_folders_of_the_server(
    name: str, message: str, package: str, tmp_path: Path
) -> None:
    options = {"model_kwargs": {"width": 3}} if name == ".models:net" else {}
    with pytest.raises(ArtifactError) as raised:
        built(tmp_path / "digits", f"{package}{name}", **options)
    assert message in str(raised.value)
    assert "/srv/secret" not in str(raised.value)
