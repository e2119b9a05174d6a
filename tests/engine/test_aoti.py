"""OPTIMIZE "aoti": a package in the place of a module, with the module's answers and weights."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import build
import fixtures
import pytest
import safetensors.torch
import torch
from torch.utils import _pytree as pytree

from torch_py_backend.config import model_config, threads
from torch_py_backend.engine import aoti, load
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import LoadError
from torch_py_backend.processes import child_process

_OPTIONS = {"OPTIMIZE": {"string_value": "aoti"}}
_WIDTH = 16
_SOURCE = f"""
import torch
from torch import nn

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, {_WIDTH})
        self.out = nn.Linear({_WIDTH}, 3)
        self.table = torch.arange({_WIDTH}).float()
        self.register_buffer("scale", torch.rand({_WIDTH}), persistent=False)

    def forward(self, ids, mask):
        x = (self.embed(ids) + self.table * torch.tensor([2.0])) * self.scale.sign()
        x = x * mask[..., None]
        if ids.shape[1] % 2:
            x = -x
        return {{"tokens": self.out(x), "mean": x.mean(1)}}
"""


_DOCUMENT = {
    "input": [
        {"name": "ids", "data_type": "TYPE_INT64", "dims": [-1]},
        {"name": "mask", "data_type": "TYPE_FP32", "dims": [-1]},
    ],
    "output": [
        {"name": "tokens", "data_type": "TYPE_FP32", "dims": [-1, 3]},
        {"name": "mean", "data_type": "TYPE_FP32", "dims": [_WIDTH]},
    ],
}


def loaded(folder: Path) -> Engine:
    arguments = build.arguments(parameters=_OPTIONS, **_DOCUMENT)
    config = model_config.parse(arguments | {"model_repository": str(folder)})
    return load.build(config, threads.budget(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with the package of the encoder."""
    folder = tmp_path_factory.mktemp("repository") / build.MODEL
    build.write(folder, "model.py", _SOURCE)
    torch.manual_seed(0)
    sizes = {"embed.weight": (20, _WIDTH), "out.weight": (3, _WIDTH), "out.bias": (3,)}
    state = {name: torch.rand(size) for name, size in sizes.items()}
    safetensors.torch.save_file(state, folder / "1" / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "run", fixtures.run_here)
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
        loaded(folder).close()
    return folder


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "run", None)


def item(rows: int, length: int) -> dict[str, Any]:
    return {"ids": torch.randint(0, 20, (rows, length)), "mask": torch.rand(rows, length)}


def check_alike(packaged: Engine, *sizes: tuple[int, int]) -> None:
    for rows, length in sizes:
        sent = item(rows, length)
        expected = packaged.loaded.owner(**sent)  # type: ignore[misc]
        (outcome,) = packaged.run([sent])
        for name, value in outcome.items():
            torch.testing.assert_close(value, expected[name], equal_nan=True)


@pytest.mark.usefixtures("no_build")
@torch.inference_mode()
def test_answers_and_weights_are_those_of_the_module(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also in a copy of the folder, without a build, and after the weights have changed."""
    caplog.set_level(logging.INFO)
    copied = shutil.copytree(folder, tmp_path / "copy" / build.MODEL)
    engine = loaded(copied)
    assert isinstance(engine.loaded.module, aoti.Packaged)
    assert engine.mapped.shared > 0
    assert "constants of its own: owner.lifted_tensor_0, owner.table" in caplog.text
    check_alike(engine, (1, 8), (2, 6), (5, 2), (8, 40), (1, 1), (3, 1), (2, 0))
    assert not engine.loaded.module.refusal
    check_alike(engine, (2, 5))
    assert "takes sizes that fulfill: (" in caplog.text
    with torch.no_grad():
        engine.loaded.owner.get_parameter("out.bias").add_(1)  # type: ignore[union-attr]
    monkeypatch.setattr(engine.loaded.module, "_module", None)  # the package answers
    check_alike(engine, (1, 8))
    for name in ("model.py", "model.safetensors", "table.npy"):  # what it depends on
        key = aoti._key(engine.config, engine.loaded, engine.device)
        with (copied / "1" / name).open("ab") as file:
            file.write(b"#")
        assert aoti._key(engine.config, engine.loaded, engine.device) != key
    engine.close()


@pytest.mark.usefixtures("no_build")
@torch.inference_mode()
def test_call_that_the_package_does_not_take_runs_eagerly(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = loaded(folder)
    sent = item(2, 4)
    sent["mask"] = torch.rand(4, 2).T
    call = engine.loaded.module
    for _ in range(2):
        expected = engine.loaded.owner(**sent)  # type: ignore[misc]
        torch.testing.assert_close(call(*sent.values()), expected)
        torch.testing.assert_close(call(**sent), expected)
    assert caplog.text.count("runs eagerly") <= 1


def _half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _zeros(content: bytes) -> bytes:
    return content.replace(b".note", bytes(5))


@pytest.mark.parametrize(
    ("suffix", "damage"), [(".pt2", _half), (".pt2", _zeros), (".safetensors", _half)]
)
def test_damaged_package_is_built_again(
    suffix: str,
    damage: Callable[[bytes], bytes],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy" / build.MODEL)
    (damaged,) = copied.glob(f"compile_cache/aoti/*{suffix}")
    damaged.write_bytes(damage(damaged.read_bytes()))
    write = mock.Mock(side_effect=lambda *_: shutil.copytree(folder, copied, dirs_exist_ok=True))
    monkeypatch.setattr(child_process, "run", write)
    engine = loaded(copied)
    write.assert_called_once()
    assert "cannot be read, and is built again: " in caplog.text
    assert isinstance(engine.loaded.module, aoti.Packaged)
    engine.close()


@pytest.mark.parametrize(
    ("calls", "sizes"),
    [
        ([(2, (2, 8)), (2, (2, 6)), (3, (3, 8)), (1, (1, 6))], [(0, 0, 1), (0, 1, 2)]),
        ([(2, (8, 2)), (2, (6, 2)), (3, (6, 3))], [(0, 0, 2), (0, 1, 1)]),
        ([(2, (4, 3)), (3, (4, 3)), (8, (8, 3))], [(0, 0, 1)]),
        ([(0, (4,)), (0, (3,))], [(0, 0, 2)]),
        ([(0, (4,)), (0, (4,))], []),
    ],
    ids=["rows first", "rows last", "buckets", "no batch", "fixed"],
)
def test_sizes_of_a_package(
    calls: list[tuple[int, torch.Size]], sizes: list[tuple[int, int, int]]
) -> None:
    """A size of 1 is taken where it is one row; the module takes the others."""
    tree = pytree.tree_structure(0)
    assert aoti._sizes([(rows, [torch.empty(shape)], tree) for rows, shape in calls]) == sizes


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("ids = ids if mask.sum() > 0 else -ids", "AOTInductor cannot compile it"),
        ("self.scale += 1", "writes to its buffers"),
    ],
)
def test_module_that_cannot_be_packaged_fails_the_load(
    statement: str, reason: str, tmp_path: Path
) -> None:
    source = _SOURCE.replace("x = x * mask", f"{statement}\n        x = x * mask")
    build.write(tmp_path, "model.py", source)
    options = _OPTIONS | {"WEIGHTS": {"string_value": "none"}}
    arguments = build.arguments(parameters=options, **_DOCUMENT)
    arguments |= {"model_repository": str(tmp_path)}
    with pytest.raises(LoadError, match=rf"{reason}.* Remove aoti from OPTIMIZE"):
        load.write_package(arguments, str(tmp_path / "x.pt2"))
