"""What a file or a parameter of a model must not do: docs/security.md, as tests."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build
import models
import pytest
import safetensors.torch
import torch

from torch_py_backend.config import options, threads
from torch_py_backend.engine import load
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import ArtifactError, ConfigError, LoadError
from torch_py_backend.loading import discovery, example_inputs
from torch_py_backend.loading.discovery import Artifact, ArtifactType

CPU = torch.device("cpu")


class _Code:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


_WRITERS: dict[str, Callable[[Any, Path], object]] = {
    "torch.save": torch.save,
    "before torch 1.6": lambda value, path: torch.save(
        value, path, _use_new_zipfile_serialization=False
    ),
    "pickle": lambda value, path: path.write_bytes(pickle.dumps(value, protocol=4)),
}


def _load(folder: Path, **overrides: Any) -> Engine:
    config = build.config(folder, **overrides)
    return load.build(config, threads.budget(config))


@pytest.mark.parametrize("kind", _WRITERS)
def test_pickles_run_no_code_as_models_or_weights(tmp_path: Path, process: None, kind: str) -> None:
    mark = tmp_path / "mark"
    written = build.write(tmp_path, "model.pt", b"")
    _WRITERS[kind]({"weight": torch.ones(3), "extra": _Code(mark)}, written)
    with pytest.raises(LoadError):
        _load(tmp_path)
    build.write(tmp_path, "model.py", models.source(models.Affine))
    for name in ("model.pt", "model.pth"):
        written = written.rename(written.with_name(name))
        with pytest.raises(LoadError):
            _load(tmp_path, weights=name)
    assert not mark.exists()


def test_repacked_weights_are_copied(tmp_path: Path, process: None) -> None:
    """Members that were compressed would be mapped as they lie there, as wrong numbers."""
    build.write(tmp_path, "model.py", models.source(models.Affine))
    expected = models.Affine().state_dict()
    torch.save(expected, tmp_path / "sound.pt")
    with (
        zipfile.ZipFile(tmp_path / "sound.pt") as sound,
        zipfile.ZipFile(tmp_path / "1" / "model.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in sound.namelist():
            packed.writestr(name, sound.read(name))
    owner = _load(tmp_path).loaded.owner
    assert owner is not None
    for name, tensor in owner.state_dict().items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04", b"\x80\x02cposix\nmkdir\n(V/x\ntR."])
def test_example_inputs_are_safetensors_and_nothing_else(tmp_path: Path, damage: bytes) -> None:
    path = build.write(tmp_path, "example_inputs.safetensors", damage)
    with pytest.raises(ArtifactError, match="cannot be read: SafetensorError"):
        example_inputs.find(build.config(tmp_path), Artifact(ArtifactType.TORCHSCRIPT, path))


def test_options_are_not_evaluated(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = f"__import__('os').mkdir('{mark}')"
    for key in options.TABLE:
        for text in (code, json.dumps({"x": code}), f"[{code}]"):
            with contextlib.suppress(ConfigError):
                options.parse({key: {"string_value": text}})
            assert not mark.exists(), key


_SECRET = "secret.safetensors"
_ELSEWHERE = [f"../../{_SECRET}", f"{{outside}}/{_SECRET}", "link", f"folder/{_SECRET}", "circle"]
_ELSEWHERE += ["a\0", "a" * 300, "/dev/zero"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with links to weights beside it."""
    folder = tmp_path / "digits"
    version = build.write(folder, "model.py", models.source(models.Affine)).parent
    safetensors.torch.save_file(models.Affine().state_dict(), tmp_path / _SECRET)
    (version / "link").symlink_to(tmp_path / _SECRET)
    (version / "folder").symlink_to(tmp_path)
    (version / "circle").symlink_to("circle")
    return folder


@pytest.mark.parametrize(
    ("option", "name"),
    [*(("weights", name) for name in _ELSEWHERE), ("default_model_filename", _ELSEWHERE[0])],
)
def test_no_path_or_link_of_an_option_leads_out_of_the_folder(
    folder: Path, option: str, name: str
) -> None:
    with pytest.raises(ConfigError, match="expected a file in the model's own folder"):
        discovery.find(build.config(folder, **{option: name.format(outside=folder.parent)}))


@pytest.mark.parametrize("shard", [*_ELSEWHERE, "gone", ""])
def test_no_shard_leads_out_of_the_folder(folder: Path, process: None, shard: str) -> None:
    index = {"weight_map": {"linear.weight": shard.format(outside=folder.parent)}}
    build.write(folder, "model.safetensors.index.json", json.dumps(index))
    with pytest.raises(ArtifactError, match="expected a file beside the index"):
        _load(folder)


@pytest.mark.parametrize("name", ["model.pt", None])
def test_a_default_name_may_be_a_link(tmp_path: Path, name: str | None) -> None:
    """A store of models that repositories link to is served; no option chose the file."""
    folder = tmp_path / "digits"
    torch.jit.script(models.Negate()).save(tmp_path / "store.pt")
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.pt").symlink_to(tmp_path / "store.pt")
    found = discovery.find(build.config(folder, default_model_filename=name))
    assert found.kind is ArtifactType.TORCHSCRIPT


def test_version_that_is_a_link(tmp_path: Path) -> None:
    """Where Triton is led to a version by a link, the files there are the model's own."""
    folder, release = tmp_path / "digits", tmp_path / "release5"
    build.write(tmp_path, "model.py", "class Net: ...\n").parent.rename(release)
    safetensors.torch.save_file({}, release / "best.safetensors")
    folder.mkdir()
    (folder / "1").symlink_to(release)
    found = discovery.find(build.config(folder, weights="best.safetensors"))
    assert found.weights == folder / "1" / "best.safetensors"
