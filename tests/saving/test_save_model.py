from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import build
import command_line
import models
import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import nn
from torch.export import Dim

from torch_py_backend import save_model
from torch_py_backend.config import pbtxt
from torch_py_backend.errors import LoadError, SaveError, ToolError
from torch_py_backend.saving import image_hooks, module_files

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.usefixtures("here")
_X = torch.rand(2, 4)
_TWO = {"model_kwargs": {"width": 2}}
_NO_BATCH = {"max_batch_size": 0}
_KEYS = {"a": _X, "b": torch.rand(2, 3)}
_DEEP = {**_KEYS, "c": {"d": _X}}
_IDS = {"ids": torch.randint(0, 20, (2, 5))}
_DYNAMIC = {"dynamic_shapes": {"ids": {0: Dim("batch"), 1: Dim("length")}}}


def _saved(folder: Path, module: nn.Module, **options: Any) -> dict[str, Any]:
    path = save_model(module, folder / "models" / "net", **options)
    assert path == folder / "models" / "net"
    assert {child.name for child in path.parent.iterdir()} == {"net"}
    return pbtxt.read(path)


# A format, or none, and the model's file.
_SOURCE, _PROGRAM = {"module": "model.py"}, {"export": "model.pt2"}
_BOTH = _SOURCE | _PROGRAM
# By default it is source, if its class can be imported and builds it again.
_SOURCE_BY_DEFAULT, _PROGRAM_BY_DEFAULT = {None: "model.py"}, {None: "model.pt2"}
_NESTED = "x [4], KWARGS[extra][bias] [4], KWARGS[pair][0] [4], KWARGS[pair][1] [4] → y [4] (8)"
_PARTS, _DOUBLE = "KWARGS[batch][a] [4], KWARGS[batch][b] [3]", "double [4], first [1] (8)"
_TOKENS = "ids INT64 [-1] → OUTPUT__0 [-1, 20], OUTPUT__1 INT64 [] (8)"
# Formats, a module, its example and other options, and the config.
_CASES: tuple[tuple[Any, Callable[[], nn.Module], Any, dict[str, Any], str], ...] = (
    (_BOTH, models.Affine, _X[:1], {"max_batch_size": 32}, "x [4] → OUTPUT__0 [3] (32)"),
    (_BOTH, models.Total, {"x": _X}, {}, "x [2, 4] → OUTPUT__0 [1] (0)"),
    (_SOURCE_BY_DEFAULT, models.Running, _X[:1], _NO_BATCH, "x [1, 4] → OUTPUT__0 [1, 4] (0)"),
    (_SOURCE, models.Negate, torch.tensor(1.0), {}, "x [1] → OUTPUT__0 [1] (0)"),
    (_SOURCE_BY_DEFAULT, lambda: models.Affine(2), _X[:, :2], _TWO, "x [2] → OUTPUT__0 [3] (8)"),
    (_PROGRAM_BY_DEFAULT, lambda: models.Affine(2), _X[:, :2], {}, "x [2] → OUTPUT__0 [3] (8)"),
    (_PROGRAM_BY_DEFAULT, lambda: nn.Linear(4, 3), _X, {}, "input [4] → OUTPUT__0 [3] (8)"),
    (_PROGRAM, models.InPlace, _X, {}, "x [4] → OUTPUT__0 [4] (8)"),
    (_BOTH, models.Nested, (_X, {"bias": _X}, (_X, _X)), {}, _NESTED),
    (_SOURCE, models.Keys, (_KEYS,), {}, f"a [4], b [3] → {_DOUBLE}"),
    (_SOURCE, models.Keys, (_KEYS, _X), {}, f"{_PARTS}, more [4] → {_DOUBLE}"),
    (_SOURCE, models.Keys, (_DEEP,), {}, f"{_PARTS}, KWARGS[batch][c][d] [4] → {_DOUBLE}"),
    (_BOTH, models.Tied, _IDS, _DYNAMIC, _TOKENS),
)


@pytest.mark.parametrize(
    ("kind", "file", "case"), [(*item, case) for kinds, *case in _CASES for item in kinds.items()]
)
def test_config_describes_the_module(kind: Any, file: str, case: Any, tmp_path: Path) -> None:
    """The module and the example do not change, also if it writes into its inputs."""
    make, example, options, described = case
    module, before = make().train(), copy.deepcopy(example)
    part = next(module.children(), module).eval()
    parameters = {"CHECK_FINITE": True, "NUM_THREADS": "1"}
    options = {**options, "format": kind, "example_inputs": example, "parameters": parameters}
    document = _saved(tmp_path, module, **options)
    version = tmp_path / "models" / "net" / "1"
    assert (version / file).exists()
    assert (version / "model.safetensors").exists() == (file == "model.py")
    assert document["parameters"]["CHECK_FINITE"]["string_value"] == "true"
    assert build.described(document) == described
    written = safetensors.torch.load_file(version / "example_inputs.safetensors")
    assert {*written} == {entry["name"] for entry in document["input"]}
    leaves = torch.utils._pytree.tree_leaves
    for value, *others in zip(written.values(), leaves(example), leaves(before), strict=True):
        assert all(torch.equal(value, torch.atleast_1d(other)) for other in others)
    assert (module.training, part.training) == (part is not module, False)


def test_options_change_how_it_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"OPTIMIZE": "bf16", "TORCH_COMPILE_OPTIONAL_PARAMETERS": {"backend": "aot_eager"}}
    document = _saved(tmp_path, models.Affine(), example_inputs=_X, parameters=options)
    assert build.described(document) == "x [4] → OUTPUT__0 [3] (8)"
    assert not [one for one in caplog.records if one.name.startswith("torch_py_backend")]


@pytest.mark.parametrize("width", [None, Dim("width")], ids=["rows", "width"])
def test_package_takes_one_row(width: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its other sizes need a check, which without that of the batch would be missing."""
    compiles = mock.Mock(side_effect=RuntimeError("no compiler"))
    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", compiles)
    shapes = width and {"x": {0: Dim("batch"), 1: width}}
    with pytest.raises(RuntimeError, match="no compiler"):
        _saved(tmp_path, models.Negate(), format="aoti", example_inputs=_X, dynamic_shapes=shapes)
    ((program,), more) = compiles.call_args
    assert program.graph_signature.user_inputs == ("x",)
    is_any = not more["inductor_configs"].get("aot_inductor.check_lowerbound", True)
    assert is_any is (width is None)
    assert min(sizes.lower for sizes in program.range_constraints.values()) == 1 or not is_any


_SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def _bert(name: str) -> tuple[Any, Any]:
    words = tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1}, "[UNK]")
    words = tokenizers.Tokenizer(words)
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    return getattr(transformers, name)(transformers.BertConfig(vocab_size=2, **_SMALL)), tokenizer


_encoder = partial(_bert, "BertModel")
_classifier = partial(_bert, "BertForSequenceClassification")


_TEXTS = {"hooks": models.Measure, "example_inputs": {"text": ["a", "longer"]}}
_BYTES = {"hooks": models.Bytes, "example_inputs": {"data": [b"\x00\xff\x10\x80"]}}
_FREE = {"dynamic_shapes": ({1: Dim("n")},)}
_LABELS = {"hooks": models.Labels, "example_inputs": {"text": ["a", "a b"]}}
_ANY_LENGTH = "[1] → last_hidden_state [-1, 16], pooler_output [16]"


@pytest.mark.parametrize(
    ("make", "options", "tensors", "written"),
    [
        (None, _TEXTS, "[1] → label STRING [], scores [3]", "'text': [['a'], ['longer']]"),
        (None, _BYTES | _FREE, "[-1] → OUTPUT__0 [3]", r"'data': [[b'\x00\xff\x10\x80']]"),
        (_encoder, {}, _ANY_LENGTH, "'text': [['a text']"),
        (_classifier, _LABELS, "[1] → label STRING [], share []", "'text': [['a'], ['a b']]"),
    ],
)
def test_hooks_are_written_beside_the_model_with_the_example_and_the_processor(
    make: Any, options: dict[str, Any], tensors: str, written: str, tmp_path: Path
) -> None:
    module, processor = make() if make else (models.Affine(), None)
    document = _saved(tmp_path, module, processor=processor, **options)
    name = written.split("'")[1]
    assert build.described(document) == f"{name} STRING {tensors} (8)"
    version = tmp_path / "models" / "net" / "1"
    assert written in (version / "hooks.py").read_text()
    assert all(path.stat().st_mode & 0o044 for path in version.iterdir())


def test_image_hooks_prepare_files_as_the_processor_does(tmp_path: Path) -> None:
    config = transformers.ViTConfig(image_size=32, patch_size=8, **_SMALL)
    module = transformers.ViTForImageClassification(config)
    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    document = _saved(tmp_path, module, processor=processor)
    assert build.described(document) == "image STRING [1] → logits [2] (8)"
    image = Image.fromarray(np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3))
    file = BytesIO()
    image.save(file, format="PNG")
    prepared = image_hooks.Hooks(tmp_path / "models" / "net" / "1").preprocess(file.getvalue())
    expected = processor(image, return_tensors="pt")["pixel_values"]
    assert torch.equal(prepared["pixel_values"], expected[0])


def test_model_py_does_not_import_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model", "hooks"):
        (tmp_path / f"{name}.py").write_text(models.source(models.Affine))
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    module, hooks = importlib.import_module("model"), importlib.import_module("hooks")
    module_files.write_source(tmp_path / "1", module.Affine(), {}, None)
    module_files.write_beside(tmp_path / "1", hooks.Affine, {})
    source = models.source(models.Affine).rstrip() + "\n"
    assert (tmp_path / "1" / "model.py").read_text() == source
    assert (tmp_path / "1" / "hooks.py").read_text() == f"{source}\n\nHooks = Affine\n"


_SCRIPT = """
from collections import Counter as Counts

import torch

LIMIT = 3


class Letters:
    def preprocess(self, text: str):
        return torch.tensor([len(Counts(text[:9]))])


class Limited(Letters):
    def preprocess(self, text: str):
        return super().preprocess(text[:LIMIT])
"""


def test_class_of_a_script_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script: Any = ModuleType("__main__")
    script.__file__ = str(tmp_path / "script.py")
    (tmp_path / "script.py").write_text(_SCRIPT)
    monkeypatch.setitem(sys.modules, "__main__", script)
    exec(compile(_SCRIPT, script.__file__, "exec"), vars(script))
    with pytest.raises(SaveError, match=r"Limited uses '(LIMIT|Letters)', which is defined in"):
        module_files.write_beside(tmp_path, script.Limited, {})
    module_files.write_beside(tmp_path, script.Counts, {})
    assert (tmp_path / "hooks.py").read_text() == "from collections import Counter as Hooks\n"
    module_files.write_beside(tmp_path, script.Letters, {})
    scope: dict[str, Any] = {}
    exec((tmp_path / "hooks.py").read_text(), scope)
    assert scope["Hooks"]().preprocess("abba") == 2


def test_model_without_a_tokenizer_takes_tokens_and_returns_no_cache(tmp_path: Path) -> None:
    ids = torch.ones(2, 5, dtype=torch.long)
    tokens = {"input_ids": ids, "attention_mask": ids}
    settings = {**_SMALL, "vocab_size": 9, "is_decoder": True, "type_vocab_size": 1}
    model = transformers.BertLMHeadModel(transformers.BertConfig(**settings))
    document = _saved(tmp_path, model, example_inputs=tokens)
    inputs = "input_ids INT64 [-1], attention_mask INT64 [-1]"
    assert build.described(document) == f"{inputs} → logits [-1, 9] (8)"
    assert [entry["optional"] for entry in document["input"]] == [False, True]


_FLOAT = (_X, {"bias": 1.0}, (_X, _X))
_HOOKED = {"hooks": models.Bytes, "example_inputs": {"data": [bytes(4)]}}
_OTHER = {"model_kwargs": {"factor": 3}}
_MODULE, _ONE = {"format": "module"}, {"example_inputs": _X[:1]}
_LM, _TOKENIZER = _bert("BertLMHeadModel")
_GENERATES = {"processor": _TOKENIZER, "parameters": {"METHOD": "generate"}}


@pytest.mark.filterwarnings("ignore")  # of torch, about what it cannot export
@pytest.mark.parametrize(
    ("module", "options", "error", "says"),
    [
        (models.Affine(), {"example_inputs": None}, SaveError, "is a NoneType; expected valid"),
        (models.Affine(), {"example_inputs": _X[:, :2]}, RuntimeError, "mat1 and mat2"),
        (models.Nested(), {"example_inputs": _FLOAT}, SaveError, r"\[bias\]' .* is a float"),
        (models.Total(), {"max_batch_size": 4}, LoadError, "output 'OUTPUT__0' is float32"),
        (models.Running(), _ONE | _MODULE, LoadError, "rows that do not depend on each other"),
        (models.Affine(), {"hooks": models.Measure}, SaveError, "expected a dict of the inputs"),
        (models.Affine(), _HOOKED | {"hooks": type("Own", (), {})}, SaveError, "file and import"),
        (models.Affine(), _HOOKED | {"format": "export"}, SaveError, r"write hooks\.py"),
        (torch.jit.script(models.Affine()), {}, SaveError, "is a RecursiveScriptModule. .* init"),
        (models.Affine(), {"format": "torchscript"}, SaveError, "one of module, .* Use format="),
        (models.Affine(), {"processor": object()}, SaveError, "expected a tokenizer or an image"),
        (_LM, _GENERATES, SaveError, 'pads on the right.*padding_side = "left"'),
        (models.Branches(2.0), {}, RuntimeError, "(?s)data-dependent.*torch.export"),
        (models.Branches(2.0), _MODULE, LoadError, "missing 1 required .*'factor'. .*KWARGS"),
        (models.Branches(2.0), _MODULE | _OTHER, LoadError, "'OUTPUT__0' differs .*model_kwargs"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    module: Any, options: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says) as refusal:
        save_model(module, tmp_path / "models" / "net", **{"example_inputs": _X, **options})
    assert "\n" not in str(refusal.value) or error is RuntimeError  # torch's own text
    assert list(tmp_path.rglob("*")) in ([], [tmp_path / "models"])


def test_folder_is_replaced_only_on_request_by_a_good_model_and_a_terminal_shows_what_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _saved(tmp_path, models.Affine(), example_inputs=_X)
    folder = tmp_path / "models" / "net"
    before = command_line.tree(folder)
    with pytest.raises(ToolError, match=r"the model's name is 'a\$b'"):
        save_model(models.Affine(), folder.with_name("a$b"), example_inputs=_X)
    with pytest.raises(ToolError, match=r"exists already; choose .*\(in Python: overwrite=True"):
        save_model(models.Negate(), folder, example_inputs=_X)
    with pytest.raises(LoadError, match="its answers are not random"):
        save_model(models.Random(), folder, example_inputs=_X, format="module", overwrite=True)
    assert command_line.tree(folder) == before
    assert [*folder.parent.iterdir()] == [folder]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    save_model(models.Negate(), folder, example_inputs=_X, overwrite=True)
    assert "loading net in a process of its own" in capsys.readouterr().err
    assert pbtxt.read(folder)["parameters"]["MODEL_CLASS"]["string_value"] == "Negate"
