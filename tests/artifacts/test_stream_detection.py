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


_STREAMS = {
    "forward": _YIELDS,
    "asynchronous": _YIELDS.replace("def", "async def"),
    "yield-from": _YIELDS.replace("yield", "yield from"),
    "assigned": _YIELDS.replace("yield x", "y = yield x"),
    "begin-and-step": _STEPS,
    "inherited": _YIELDS + "class D(A):\n    pass\n",
    "circle": _YIELDS.replace("nn.Module", "B") + _PLAIN.replace("nn.Module", "A"),
    "function": "def forward(x):\n    yield x\n",
    "function-beside-a-class": "class Options:\n    size = 3\ndef forward(x):\n    yield x\n",
}
_OTHERS = {
    "step-alone": _STEPS.replace("begin", "start"),
    "begin-alone": _STEPS.replace("step", "stop"),
    "helper-yields": _PLAIN + "\ndef helper():\n    yield 1\n",
    "another-method": _YIELDS.replace("forward", "other"),
    "function-within": _YIELDS.replace("yield x", "def f():\n            yield 1"),
    "expression": _YIELDS.replace("yield x", "return (a for a in x)"),
    "plain-function": "def forward(x):\n    return x\n",
    "a-helper-with-begin-and-step": _PLAIN + _STEPS.replace("(nn.Module)", ""),
    "a-private-class": _PLAIN + _YIELDS.replace("A(", "_A("),
    "a-private-function": "def _parts(x):\n    yield x\ndef forward(x):\n    return _parts(x)\n",
    "an-example": "def example_inputs():\n    yield 1\ndef forward(x):\n    return x\n",
    "a-word": "# yield\nyielded = 'yield'\n",
    "no-python": "def forward(:\n",
    "no-text": "\0",
}


@pytest.mark.parametrize("name", [*_STREAMS, *_OTHERS])
def test_in_source(name: str, tmp_path: Path) -> None:
    """The served class or function yields, or has begin() and step(); others do not count."""
    path = tmp_path / "model.py"
    path.write_text((_STREAMS | _OTHERS)[name])
    assert stream_detection.is_streaming(path) is (name in _STREAMS)


@pytest.mark.parametrize(
    ("named", "method", "expected"),
    [
        ("B", None, False),
        ("C", None, True),
        ("f", None, True),
        ("absent", None, False),
        ("A", "other", False),
        ("C", "begin", False),
    ],
)
def test_named_class_and_method(
    named: str, method: str | None, expected: bool, tmp_path: Path
) -> None:
    """MODEL_CLASS and METHOD select the code to inspect; a missing file does not stream."""
    path = tmp_path / "model.py"
    assert not stream_detection.is_streaming(path, named=named, method=method)
    path.write_text(_YIELDS + _PLAIN + _STEPS + "def f(x):\n    yield x\n")
    assert stream_detection.is_streaming(path, named=named, method=method) is expected
