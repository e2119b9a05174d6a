"""Detection of streaming models from the text of model.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_py_backend.artifacts import stream_detection

_YIELDS = "class A(nn.Module):\n    def forward(self, x):\n        yield x\n"
_PLAIN = "class B(nn.Module):\n    def forward(self, x):\n        return x\n"
_STEPS = (
    "class C(nn.Module):\n    def begin(self, x):\n        return x\n"
    "    def step(self, states):\n        return []\n"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(_YIELDS, True, id="forward"),
        pytest.param(_YIELDS.replace("def", "async def"), True, id="asynchronous"),
        pytest.param(_YIELDS.replace("yield", "yield from"), True, id="yield-from"),
        pytest.param(_YIELDS.replace("yield x", "y = yield x"), True, id="assigned"),
        pytest.param(_STEPS, True, id="begin-and-step"),
        pytest.param(_STEPS.replace("begin", "start"), False, id="step-alone"),
        pytest.param(_STEPS.replace("step", "stop"), False, id="begin-alone"),
        pytest.param(_PLAIN, False, id="plain"),
        pytest.param(_PLAIN + "\ndef helper():\n    yield 1\n", False, id="helper-yields"),
        pytest.param(_YIELDS.replace("forward", "other"), False, id="another-method"),
        pytest.param(
            "class A(B):\n    def forward(self):\n        def f():\n            yield 1\n", False,
            id="function-within",
        ),
        pytest.param(
            "class A(B):\n    def forward(self):\n        return (a for a in f)\n",
            False,
            id="expression",
        ),
        pytest.param(_YIELDS + "class D(A):\n    pass\n", True, id="inherited"),
        pytest.param(
            _YIELDS.replace("nn.Module", "B") + _PLAIN.replace("nn.Module", "A"), True, id="circle"
        ),
        pytest.param("def forward(x):\n    yield x\n", True, id="function"),
        pytest.param("def forward(x):\n    return x\n", False, id="plain-function"),
        pytest.param(
            _PLAIN + _STEPS.replace("(nn.Module)", ""), False, id="a-helper-with-begin-and-step"
        ),
        pytest.param(_PLAIN + _YIELDS.replace("A(", "_A("), False, id="a-private-class"),
        pytest.param(
            "def _parts(x):\n    yield x\n\n\ndef forward(x):\n    return list(_parts(x))\n",
            False,
            id="a-private-function",
        ),
        pytest.param(
            "def example_inputs():\n    yield 1\n\n\ndef forward(x):\n    return x\n",
            False,
            id="an-example",
        ),
        pytest.param(
            "class Options:\n    size = 3\n\n\ndef forward(x):\n    yield x\n",
            True,
            id="function-beside-a-class",
        ),
        pytest.param("# yield\nyielded = 'yield'\n", False, id="a-word"),
        pytest.param("def forward(:\n", False, id="no-python"),
        pytest.param("\0", False, id="no-text"),
        pytest.param("", False, id="empty"),
    ],
)  # fmt: skip
def test_in_source(text: str, expected: bool, tmp_path: Path) -> None:
    """The served class or function yields, or has begin() and step(); others do not count."""
    path = tmp_path / "model.py"
    path.write_text(text)
    assert stream_detection.is_streaming(path) is expected


@pytest.mark.parametrize(
    ("named", "method", "expected"),
    [
        ("A", None, True),
        ("B", None, False),
        ("C", None, True),
        ("f", None, True),
        ("absent", None, False),
        ("A", "other", False),
        ("C", "begin", False),
        (None, None, True),
    ],
)
def test_named_class_and_method(
    named: str | None, method: str | None, expected: bool, tmp_path: Path
) -> None:
    """MODEL_CLASS and METHOD select the code to inspect."""
    path = tmp_path / "model.py"
    path.write_text(_YIELDS + _PLAIN + _STEPS + "def f(x):\n    yield x\n")
    assert stream_detection.is_streaming(path, named=named, method=method) is expected


def test_missing_file(tmp_path: Path) -> None:
    """A missing file does not stream; loading it reports the error."""
    assert stream_detection.is_streaming(tmp_path / "model.py") is False
