from __future__ import annotations

from pathlib import Path
from typing import Any

import build
import pytest

from torch_py_backend.config import conflicts
from torch_py_backend.errors import ArtifactError, ConfigError, ForwardError, InputError
from torch_py_backend.loading import discovery
from torch_py_backend.loading import hooks as user_hooks
from torch_py_backend.loading.hooks import Hook, Hooks

_NET = "def forward(x):\n    return x\n"


def load(folder: Path, code: str, **overrides: Any) -> Hooks:
    build.write(folder, "model.py", _NET)
    build.write(folder, "hooks.py", code)
    settings = build.config(folder, **overrides)
    conflicts.check(settings)
    hooks = user_hooks.load(settings, discovery.find(settings))
    assert hooks is not None
    return hooks


def method(definition: str) -> str:
    return f"class Hooks:\n    {definition}: ...\n"


_FUNCTIONS = """
class Hooks:
    def __init__(self, folder):
        self.folder = folder

    postprocess = staticmethod(lambda result: 1)

    def preprocess(self, x, y=1): ...
"""


def test_hooks_are_methods_or_functions_of_a_class_that_may_take_the_folder(tmp_path: Path) -> None:
    hooks = load(tmp_path, _FUNCTIONS)
    assert hooks.preprocess is not None
    assert hooks.preprocess.method.__self__.folder == tmp_path / "1"  # type: ignore[attr-defined]
    assert hooks.postprocess is not None
    assert hooks.postprocess(2) == 1


_BOTH = "def postprocess(self, x): ...\n    def postprocess_batch(self, x)"
_NO_PAIR = "def preprocess_batch(self, x): ...\n    def collate(self, rows)"
_INIT = "def preprocess(self, x): ...\n    def __init__(self"
_FAILS = "def __init__(self):\n        1 / 0\n    def preprocess(self, x)"
_ONE = "def preprocess(self, x, parameters)"
_UNBATCHED = {"max_batch_size": 0}


@pytest.mark.parametrize(
    ("definition", "overrides", "error", "message"),
    [
        (_INIT + ", folder, size)", {}, ArtifactError, "'size'. Its arguments are none, or"),
        (_FAILS, {}, ArtifactError, "Hooks() in hooks.py fails at line 3: ZeroDivisionError"),
        ("def add(self)", {}, ArtifactError, "no class Hooks with hooks"),
        ("def postprocess(self, x, labels)", {}, ArtifactError, "a required argument: 'labels'"),
        ("def inference(self, x)", {}, ArtifactError, "hooks.py: inference was removed. Call"),
        (_NO_PAIR, {}, ArtifactError, "has collate() and no preprocess()"),
        (_BOTH, _UNBATCHED, ArtifactError, "has postprocess() and postprocess_batch()"),
        ("def postprocess_batch(self, x)", _UNBATCHED, ConfigError, "max_batch_size is 0"),
        (_ONE, {"response_cache": True}, ConfigError, "which response_cache does not compare"),
        (_ONE, {"pad": {"x": {}}}, ConfigError, "hooks.py is beside the model, and PAD is set"),
        (_ONE, {"batch_outputs": {"y": "x"}}, ConfigError, "config.pbtxt has batch_input or"),
    ],
)
def test_hooks_that_are_refused(
    definition: str, overrides: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as refusal:
        load(tmp_path, method(definition), **overrides)
    assert message in str(refusal.value)


def test_any_hook_may_take_parameters(tmp_path: Path) -> None:
    for definition in (
        "def preprocess(self, x, parameters)",
        "def preprocess_batch(self, parameters, x)",
        "def postprocess(self, out, parameters=None)",
        "def postprocess_batch(self, out, parameters)",
    ):
        assert load(tmp_path, method(definition)).takes_parameters


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (ValueError("no"), True),
        (OSError("cannot identify image file"), True),
        (FileNotFoundError(2, "no labels"), False),
        (RuntimeError("no"), False),
        (SystemExit(3), False),
    ],
)
def test_value_errors_of_preprocess_are_the_clients(error: BaseException, refused: bool) -> None:
    def fails(*_: object) -> None:
        raise error

    for name in ("preprocess", "preprocess_batch", "collate"):
        hook = Hook(name, fails)
        of_client = refused and name != "collate"
        with pytest.raises(InputError if of_client else ForwardError) as raised:
            hook()
        assert type(error).__name__ in str(raised.value)
        assert isinstance(raised.value, ForwardError) == (raised.value.__cause__ is error)


def test_first_refusal_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hooks = load(tmp_path, "class Hooks:\n    def preprocess(self, x):\n        return int(x)\n")
    assert hooks.preprocess is not None
    for value in ("one", "two"):
        with pytest.raises(InputError):
            hooks.preprocess(value)
    (refusal,) = caplog.messages
    assert refusal.startswith("preprocess() refuses an input. ")
    assert 'hooks.py", line 3' in caplog.text
