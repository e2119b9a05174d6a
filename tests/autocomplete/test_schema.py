from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import build
import fake_triton
import pytest
import safetensors.torch
import scenarios
import torch
from torch import Tensor, nn

from torch_py_backend.adapter import TritonPythonModel
from torch_py_backend.autocomplete import schema
from torch_py_backend.errors import ConfigError, ForwardError, LoadError
from torch_py_backend.loading import registry
from torch_py_backend.processes import child_process

pytestmark = pytest.mark.usefixtures("imports")


def test_complete_config_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "run", mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr(fake_triton, "_model_dir", "/models/digits/1")
    config: Any = fake_triton.ModelConfig(json.loads(build.arguments()["model_config"]))
    assert TritonPythonModel.auto_complete_config(config) is config


_HEADER = "import numpy as np\nimport torch\nfrom torch import nn\n\n"


def _describe(folder: Path, **document: Any) -> str:
    """Return the inputs, outputs and max_batch_size of a model."""
    arguments = build.arguments(**{"input": [], "output": [], "max_batch_size": 0} | document)
    return build.described(schema.describe(arguments | {"model_repository": str(folder)}))


class _Typed(nn.Module):
    def forward(self, x: Tensor, extra: dict[str, Any], *, mask: Tensor) -> dict[str, Any]:
        parts = None, 3, mask, x.to(torch.bfloat16)  # None and numbers are no outputs
        return {"sum": x + extra["ids"][..., None] + extra["more"][0][..., None], "parts": parts}


def _listed(name: str, *dims: int, kind: str = "FP32") -> list[dict[str, Any]]:
    return [{"name": name, "data_type": f"TYPE_{kind}", "dims": [*dims]}]


def test_exported_program_describes_itself_and_its_example_is_not_read(tmp_path: Path) -> None:
    ids, more = torch.ones(2, 3, 5, dtype=torch.int64)
    mask = torch.ones(3, 1, dtype=torch.bool)
    one, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", max=32)
    both = {0: one, 1: length}
    program = torch.export.export(
        _Typed(),
        (torch.rand(3, 5, 4), {"ids": ids, "more": [more]}),
        {"mask": mask},
        dynamic_shapes={"x": both, "extra": {"ids": both, "more": [both]}, "mask": {0: one}},
    )
    build.write(tmp_path, "example_inputs.safetensors", b"no such file")
    torch.export.save(program, tmp_path / "1" / "model.pt2")
    inputs = "x [-1, 4], ids INT64 [-1], ARGS[1][more][0] INT64 [-1], mask BOOL [1]"
    outputs = "sum {0}-1, 4], OUTPUT__3 BOOL {0}1], OUTPUT__4 BF16 {0}-1, 4]"
    assert _describe(tmp_path) == f"{inputs} → {outputs.format('[')} (64)"
    # Without a batch dimension, if the inputs are listed.
    described = _describe(tmp_path, input=_listed("x", -1, -1, 4))
    assert described == f"x [-1, -1, 4] → {outputs.format('[-1, ')} (0)"


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_package_is_tried_on_its_own_device(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    load = mock.Mock(side_effect=LoadError("it is only looked for"))
    monkeypatch.setattr(registry, "load", load)
    with zipfile.ZipFile(build.write(tmp_path, "model.pt2", ""), "w") as package:
        metadata = json.dumps({"AOTI_DEVICE_KEY": device.partition(":")[0]})
        package.writestr("model/data/aotinductor/model/a_metadata.json", metadata)
    with pytest.raises(LoadError):
        _describe(tmp_path)
    assert str(load.call_args.args[2]) == device


_STRICT = """
def forward(x):
    assert x.min() > 1, "x is too small"
    return x
"""


def test_model_that_refuses_made_up_values_needs_an_example_or_outputs(tmp_path: Path) -> None:
    build.write(tmp_path, "model.py", _STRICT)
    message = "the model fails with made-up values for its inputs: .*x is too small.*example"
    with pytest.raises(ConfigError, match=message) as error:
        _describe(tmp_path, input=_listed("x", -1), max_batch_size=4)
    assert "write the outputs into config.pbtxt" in str(error.value)


@pytest.mark.parametrize(
    "written",
    [
        {"batch_input": [{}]},
        {"batch_output": [{}]},
        {"sequence_batching": {"direct": {}}},
        {"model_transaction_policy": {"decoupled": True}},
    ],
)
def test_models_whose_tensors_are_not_inferred(written: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"which are not inferred for .*; expected data_type"):
        _describe(tmp_path, **written)


def _function(body: str, examples: str) -> str:
    arguments = "x: list[str]" if "texts" in body else "x, t=None"
    return (
        f"{_HEADER}\ndef forward({arguments}):\n    return {body.replace('texts', 'x')}\n\n\n"
        f"def example_inputs():\n    return {examples}\n"
    )


_FOUR = "torch.rand(2, 4)"
_TWO = f"{_FOUR}, 't': torch.rand(4, 2)"
_GRAD = "torch.rand(2, 4, requires_grad=True)"
_STRING = "OUTPUT__0 STRING [], OUTPUT__1 []"
_TEXTS = "np.array([['a', 'b'], ['c', 'd']])"


@pytest.mark.parametrize(
    ("body", "example", "listed", "described"),
    [
        ("x * 2", "torch.rand(1, 4)", {}, "x [4] → OUTPUT__0 [4] (8)"),
        ("x.repeat(2, 1)", _FOUR, {}, "x [2, 4] → OUTPUT__0 [4, 4] (0)"),
        ("x, x.mean(0)", _FOUR, {}, "x [2, 4] → OUTPUT__0 [2, 4], OUTPUT__1 [4] (0)"),
        ("{'a': x, 'i': x.argmax(1)}", _GRAD, {}, "x [4] → a [4], i INT64 [] (8)"),
        ("float(x.sum())", "torch.rand(2)", {}, "x [2] → OUTPUT__0 [1] (0)"),
        ("x @ t", _TWO, {}, "x [2, 4], t [4, 2] → OUTPUT__0 [2, 2] (0)"),
        ("texts[::2], torch.ones(len(texts) // 2)", _TEXTS, {}, f"x STRING [2] → {_STRING} (8)"),
        # What config.pbtxt lists is kept.
        ("x[1:]", _FOUR, {"output": _listed("z", 3)}, "x [2, 4] → z [3] (0)"),
        ("x[1:]", _FOUR, {"max_batch_size": 16}, "x [4] → OUTPUT__0 [4] (16)"),
        # Without a batch dimension, as inputs are listed.
        ("x[1:]", _FOUR, {"input": _listed("x", -1, 4)}, "x [-1, 4] → OUTPUT__0 [-1, 4] (0)"),
    ],
)
def test_tensors_are_those_of_the_example_and_a_batch_grows_with_it(
    body: str, example: str, listed: dict[str, Any], described: str, tmp_path: Path
) -> None:
    build.write(tmp_path, "model.py", _function(body, f"{{'x': {example}}}"))
    assert _describe(tmp_path, **listed) == described


def test_file_of_examples_comes_before_a_function(tmp_path: Path) -> None:
    build.write(tmp_path, "model.py", _function("x[:, :3]", "1 / 0"))
    examples = safetensors.torch.save({"x": torch.rand(2, 4)})
    build.write(tmp_path, "example_inputs.safetensors", examples)
    assert _describe(tmp_path) == "x [4] → OUTPUT__0 [3] (8)"


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ("{'x': torch.rand(2, 4), 'z': torch.rand(2)}", r"forward\(x, t=None\) has no z"),
        ("{'x': torch.rand(2, 5)}", r"forward\(\) raised"),
        ("{'x': torch.rand(2, 4).cfloat()}", "input 'x' has data_type torch.complex64"),
        ("3", r"example_inputs\(\) in model.py fails at TypeError: 'int' object"),
        ("1 / 0", r"example_inputs\(\) in model.py fails at line 11: ZeroDivisionError"),
        (None, "example_inputs.safetensors"),
    ],
)
def test_invalid_examples(tmp_path: Path, examples: str | None, message: str) -> None:
    if examples is None:
        build.write(tmp_path, "example_inputs.safetensors", b"<html>not found</html>")
    build.write(tmp_path, "model.py", _function("x @ torch.rand(4, 3)", str(examples)))
    with pytest.raises((LoadError, ForwardError), match=message):
        _describe(tmp_path)


_HOOKS = f"""{_HEADER}
def example_inputs():
    return dict.fromkeys("{{0}}", torch.rand({{1}}, 4))


def forward(x):
    assert x.ndim == 2, "rows are required"
    return x[:, :3]


class Hooks:
"""
_OF_TEXTS = """
    def preprocess_batch(self, texts: list[str]):
        return torch.ones(len(texts), 4)

    def postprocess(self, result):
        return {'label': str(len(result))}
"""
_TEXTS_LISTED = {"input": _listed("texts", 1, kind="STRING"), "max_batch_size": 2}
_BY_ROW = "    def preprocess(self, x"


@pytest.mark.parametrize(
    ("example", "rows", "methods", "config", "described"),
    [
        ("", 0, _OF_TEXTS, _TEXTS_LISTED, "texts STRING [1] → label STRING [] (2)"),
        ("xm", 2, f"{_BY_ROW}, m): return x * 2\n", {}, "x [4], m [4] → OUTPUT__0 [3] (8)"),
        ("x", 1, f"{_BY_ROW}): return x * 2\n", {}, "x [4] → OUTPUT__0 [3] (8)"),
        ("x", 2, f"{_BY_ROW}): return x.reshape(2, 4)\n", {}, "x [2, 4] → OUTPUT__0 [2, 3] (0)"),
    ],
)
def test_inputs_come_from_config_or_example_and_outputs_from_the_hooks(
    example: str, rows: int, methods: str, config: dict[str, Any], described: str, tmp_path: Path
) -> None:
    (tmp_path / "1").mkdir()
    scenarios.hooked(_HOOKS.format(example, rows) + methods)(tmp_path / "1")
    assert _describe(tmp_path, **config) == described
