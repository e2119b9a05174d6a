"""Hooks: the class, the arguments of its methods, and the files it may be in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import build
import models
import pytest
import torch

from torch_py_backend.artifacts import discovery
from torch_py_backend.artifacts.discovery import ArtifactType
from torch_py_backend.config.batch_io import BatchOutput
from torch_py_backend.errors import (
    ArtifactError,
    ConfigError,
    HookError,
    InputError,
    LoadError,
    SourceError,
)
from torch_py_backend.hooks import user_hooks
from torch_py_backend.hooks.user_hooks import Hook, Hooks

_HEADER = "import torch\nfrom torch import Tensor, nn\n\n\n"
_NET = """\
class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


"""
_POST = "    def postprocess(self, result):\n        return result\n"
_HOOKS = f"class Hooks:\n{_POST}"
_FUNCTION = "class Hooks:\n    postprocess = staticmethod(lambda result: 1)\n"


def load(folder: Path, code: str, **overrides: Any) -> Hooks | None:
    """Write a model.py with hooks and load them."""
    build.write(folder, "model.py", _HEADER + code)
    settings = build.config(folder, **overrides)
    return user_hooks.load(settings, discovery.find(settings))


def methods(*definitions: str) -> str:
    """Return the source of a class of hooks with these methods."""
    lines = [f"    {definition}:\n        return None" for definition in definitions]
    return _NET + "class Hooks:\n" + "\n".join(lines) + "\n"


# --- the class -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "options", "found"),
    [
        (_NET + _HOOKS, {}, True),
        (_NET + _HOOKS.replace("Hooks", "Around"), {"hooks": "Around"}, True),
        (_NET + _FUNCTION, {"hooks": "Hooks"}, True),
        # a module from a package has its hooks in model.py
        (_HOOKS, {"model_factory": "torch.nn:Identity"}, True),
        # other objects with that name
        (_NET, {}, False),
        (_NET + _HOOKS, {"hooks": "none"}, False),
        (_NET + "class Hooks:\n    def add(self): ...\n", {}, False),
        (_NET + f"class Hooks(nn.Module):\n{_POST}", {}, False),
        (f"Base = nn.Module\nclass Hooks(Base):\n{_POST}", {}, False),
        (_NET + "def Hooks(): ...\n", {}, False),
    ],
)
def test_class(code: str, options: dict[str, Any], found: bool, tmp_path: Path) -> None:
    """The class is Hooks with some of the methods, or the class that the parameter HOOKS names."""
    hooks = load(tmp_path, code, **options)
    assert (hooks is not None) == found
    if hooks is not None:
        assert [hook.name for hook in hooks.defined] == ["postprocess"]


def test_folder(tmp_path: Path) -> None:
    """A constructor with an argument for the folder gets the version folder."""
    code = f"class Hooks:\n    def __init__(self, folder):\n        self.folder = folder\n{_POST}"
    hooks = load(tmp_path, _NET + code)
    assert hooks is not None
    assert hooks.postprocess is not None
    assert hooks.postprocess.method.__self__.folder == tmp_path / "1"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("code", "options", "message"),
    [
        (
            f"class Hooks:\n    def __init__(self, folder, size):\n        pass\n{_POST}",
            {},
            "Hooks(folder, size) in model.py cannot be called",
        ),
        (
            f"class Hooks:\n    def __init__(self):\n        raise OSError('no labels')\n{_POST}",
            {},
            "Hooks() in model.py fails at line 12: OSError: no labels",
        ),
        (_HOOKS, {"hooks": "Around"}, "Around, which is to run around forward(), is not a class"),
        (_HOOKS, {"hooks": "Net"}, "is an nn.Module in model.py"),
        ("class Hooks:\n    def add(self): ...\n", {"hooks": "Hooks"}, "forward(), has no hooks"),
        ("class Hooks:\n    postprocess = 3\n", {"hooks": "Hooks"}, "is an int; expected a method"),
    ],
)
def test_refused_class(code: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A class that cannot be created, or has no hooks, is named at load."""
    with pytest.raises(SourceError) as refusal:
        load(tmp_path, _NET + code, **options)
    assert message in str(refusal.value)


# --- methods ---------------------------------------------------------------------------------


def test_signatures(tmp_path: Path) -> None:
    """Arguments may have any name but `parameters`; arguments with defaults are ignored."""
    for definition in (
        "def preprocess(self, x, parameters)",
        "def preprocess_batch(self, parameters, x)",
        "def collate(self, items, parameters=None)",
        "def inference(self, net, batch, *, parameters)",
        "def postprocess(self, result, extra=1)",
        "def postprocess(self, *everything)",
        "def postprocess_batch(self, out, parameters)",
    ):
        hooks = load(tmp_path, methods(definition))
        assert hooks is not None
        assert hooks.takes_parameters == ("parameters" in definition)


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("def collate(self)", "expected collate(self, items)"),
        ("def forward(self, x)", "expected forward(self, module, batch)"),
        ("def postprocess(self, result, labels)", "missing a required argument: 'labels'"),
        ("def postprocess(self, parameters, result)", "multiple values for argument 'parameters'"),
        (
            "def preprocess_batch(self, x):\n        pass\n    def collate(self, rows)",
            "Hooks has preprocess_batch() and collate()",
        ),
        ("async def postprocess(self, result)", "is asynchronous or a generator"),
        ("def postprocess(self, result):\n        yield result #", "is asynchronous or a gener"),
    ],
)
def test_refused_signatures(definition: str, message: str, tmp_path: Path) -> None:
    """A method with other arguments is refused with the expected ones."""
    with pytest.raises(SourceError) as refusal:
        load(tmp_path, methods(definition))
    assert message in str(refusal.value)
    assert definition.partition("def ")[2].partition("(")[0] in str(refusal.value)


@pytest.mark.parametrize(
    ("definition", "overrides", "message"),
    [
        ("def collate(self, items)", {"max_batch_size": 0}, "collate(), and max_batch_size is 0"),
        (
            "def postprocess(self, result)",
            {"preprocess_threads": 2},
            "and there is no preprocess()",
        ),
        ("def preprocess(self, x)", {"pad": {"x": {}}}, "PAD is set"),
        (
            "def preprocess(self, x)",
            {"batch_outputs": (BatchOutput("y", "x"),)},
            "config.pbtxt has batch_input or batch_output, and Hooks has hooks",
        ),
        (
            "def preprocess(self, x, parameters)",
            {"inputs": (build.spec("x"), build.spec("parameters"))},
            "an input is named parameters",
        ),
        (
            "def preprocess(self, x, parameters)",
            {"response_cache": True},
            "response_cache is enabled, and Hooks reads the parameters of requests",
        ),
    ],
)
def test_contradictions(
    definition: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Options that exclude hooks are refused at load."""
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, methods(definition), **overrides)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (ValueError("no"), True),
        (OSError("cannot identify image file"), True),
        (FileNotFoundError(2, "no labels"), False),
        (RuntimeError("no"), False),
        (TypeError("unsupported operand"), False),
        (SystemExit(3), False),
    ],
)
def test_client_errors(error: BaseException, refused: bool) -> None:
    """A ValueError in preprocess() is the client's fault; other errors are the model's."""

    def fails() -> None:
        raise error

    for name in ("preprocess", "preprocess_batch", "collate"):
        hook = Hook("digits", name, fails, "", takes_parameters=False)
        of_client = refused and name != "collate"
        with pytest.raises(InputError if of_client else HookError) as raised:
            hook()
        assert type(error).__name__ in str(raised.value)
        assert isinstance(raised.value, HookError) == (raised.value.__cause__ is error)


_REFUSES = """\
class Hooks:
    def preprocess(self, x):
        if x.sum() > 9:
            raise ValueError("too much")
        return int("no number")
"""


def test_refusals_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A refusal may be a mistake in preprocess(): the log has the first one of each line."""
    hooks = load(tmp_path, _NET + _REFUSES)
    assert hooks is not None
    assert hooks.preprocess is not None
    for value in (1.0, 10.0, 1.0, 10.0):
        with pytest.raises(InputError):
            hooks.preprocess(torch.tensor(value))
    refusals = [record.getMessage().partition(". ")[0] for record in caplog.records]
    begins = "model 'digits': preprocess() in model.py refuses an input at line"
    number = "ValueError: invalid literal for int() with base 10: 'no number'"
    assert refusals == [f"{begins} 14: {number}", f"{begins} 13: ValueError: too much"]


# --- files -----------------------------------------------------------------------------------


def script(folder: Path, name: str = "model.pt") -> None:
    (folder / "1").mkdir(parents=True, exist_ok=True)
    torch.jit.script(models.Negate()).save(folder / "1" / name)


@pytest.mark.parametrize(
    ("code", "overrides", "kind"),
    [
        (_HOOKS, {"default_model_filename": "model.pt"}, ArtifactType.TORCHSCRIPT),
        # TorchScript beside a module is its weights, which their loader refuses
        (_NET, {}, ArtifactType.MODULE),
        (_NET + _HOOKS, {"default_model_filename": "model.py"}, ArtifactType.MODULE),
        (_NET + _HOOKS, {"model_class": "Net"}, ArtifactType.MODULE),
    ],
)
def test_hooks_beside_a_model(
    code: str, overrides: dict[str, Any], kind: ArtifactType, tmp_path: Path
) -> None:
    """A model.py with hooks adds them to a complete model beside it; one without adds nothing."""
    script(tmp_path)
    build.write(tmp_path, "model.py", _HEADER + code)
    artifact = discovery.find(build.config(tmp_path, **overrides))
    assert artifact.kind is kind
    assert (artifact.hooks is not None) == ("Hooks" in code)


def test_refused_files(tmp_path: Path) -> None:
    """HOOKS without a source, a module beside another model, and broken hooks are refused."""
    script(tmp_path)
    with pytest.raises(ArtifactError, match=r"HOOKS is 'Around', and version 1 has no model\.py"):
        discovery.find(build.config(tmp_path, hooks="Around"))
    two = r"model\.py defines the module Net and hooks, and model\.pt.* with default_model_filename"
    with pytest.raises(ConfigError, match=two):
        load(tmp_path, _NET + _HOOKS)
    with pytest.raises(LoadError, match=r"model\.py fails at line"):
        load(tmp_path, _HOOKS.replace(":", "", 1), default_model_filename="model.pt")


def test_files_of_hooks(tmp_path: Path) -> None:
    """The hooks of net.pt are in net.py; a state_dict beside hooks is the module's weights."""
    script(tmp_path, "net.pt")
    build.write(tmp_path, "net.py", _HEADER + _HOOKS)
    settings = build.config(tmp_path, default_model_filename="net.pt")
    assert discovery.find(settings).hooks == tmp_path / "1" / "net.py"
    folder = tmp_path / "other"
    source = build.write(folder, "model.py", _HEADER + _NET + _HOOKS)
    torch.save({"weight": torch.ones(2)}, source.with_name("model.pt"))
    artifact = discovery.find(build.config(folder))
    assert (artifact.kind, artifact.hooks) == (ArtifactType.MODULE, source)
    assert artifact.weights == source.with_name("model.pt")


def test_as_text() -> None:
    """The text lists the methods in the order in which they run, as they are declared."""
    hooks = {
        name: Hook("m", name, str, f"{name}(x)", takes_parameters=False)
        for name in ("postprocess", "preprocess")
    }
    assert str(Hooks(**hooks)) == "preprocess(x), postprocess(x)"
