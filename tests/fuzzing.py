"""Fuzz targets: functions of bytes that may raise the errors of their parser, and no others.

`tests/test_fuzzing.py` calls them with mutated artifacts, `tests/fuzz.py` with inputs of atheris.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import build

from torch_py_backend.config import options, pbtxt
from torch_py_backend.errors import LoadError
from torch_py_backend.loading import discovery, source_dependencies
from torch_py_backend.model_folders.archive import unpack

Target = Callable[[Path, bytes], None]


def artifact(folder: Path, data: bytes) -> None:
    """Discovery of a model whose file is damaged, and what is known of it before it is loaded."""
    (folder / "1").mkdir(exist_ok=True)
    path = folder / "1" / "model.pt"
    path.write_bytes(data)
    with contextlib.suppress(LoadError):
        discovery.find(build.config(folder))
    discovery.aoti_metadata(path)
    discovery.can_be_mapped(path)


def index(folder: Path, data: bytes) -> None:
    """An index of weights, and the files that it names."""
    path = folder / "model.safetensors.index.json"
    path.write_bytes(data)
    (folder / "model.py").touch()
    source_dependencies.find(folder / "model.py")


def source(folder: Path, data: bytes) -> None:
    """The imports of a source from its own folder."""
    (folder / "net.py").write_bytes(data)
    with contextlib.suppress(LoadError):
        source_dependencies.find(folder / "net.py")


def option(folder: Path, data: bytes) -> None:
    """One parameter of config.pbtxt, chosen by the first byte."""
    row = options.TABLE[data[0] % len(options.TABLE)] if data else options.TABLE[0]
    text = data[1:].decode(errors="replace")
    with contextlib.suppress(LoadError):
        options.parse({row.key: {"string_value": text}})


def config(folder: Path, data: bytes) -> None:
    """A config.pbtxt."""
    (folder / "config.pbtxt").write_bytes(data)
    with contextlib.suppress(LoadError):
        pbtxt.read(folder)


def archive(folder: Path, data: bytes) -> None:
    """An archive of TorchServe: unpacked within its folder, or refused."""
    path = folder / "net.mar"
    path.write_bytes(data)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        target = Path(scratch, "net")
        with contextlib.suppress(LoadError):
            unpack(path, target)
        assert {path.name for path in Path(scratch).iterdir()} <= {"net"}


_TARGETS = (artifact, index, source, option, config, archive)
TARGETS: dict[str, Target] = {target.__name__: target for target in _TARGETS}


# --- seeds -----------------------------------------------------------------

_CONFIG = b"""
backend: "pytorch_py"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] reshape { shape: [ 4 ] } }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 3 ] }]
instance_group [{ kind: KIND_CPU count: 2 }]
parameters { key: "WEIGHTS" value { string_value: "none" } }
"""
_SOURCE = b"""
import torch
from . import layers
from .blocks import attention as a
import pack.inner

class Net(torch.nn.Module):
    def forward(self, x): return x
"""


def _zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"model/{name}", data)
    return buffer.getvalue()


def _state_dict() -> bytes:
    """Return a file as torch.save writes it for a tensor, without torch."""
    pickled = (
        b"\x80\x02}q\x00X\x01\x00\x00\x00wq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\x00"
        b"\x00\x00storageq\x03ctorch\nFloatStorage\nq\x04X\x01\x00\x00\x000q\x05X\x03\x00\x00\x00"
        b"cpuq\x06K\x06tq\x07QK\x00K\x06\x85q\x08K\x01\x85q\t\x89ccollections\nOrderedDict\nq\n)Rq"
        b"\x0btq\x0cRq\rs."
    )
    return _zipped(**{"data.pkl": pickled, "version": b"3\n", "data/0": bytes(24)})


def _archived() -> bytes:
    """Return a .mar file."""
    buffer = io.BytesIO()
    model = {"handler": "base_handler", "serializedFile": "net.pt", "configFile": "c.yaml"}
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as written:
        written.writestr("net.pt", "")
        written.writestr("c.yaml", "batchSize: 8\nmaxBatchDelay: 50\n")
        written.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": model}))
    return buffer.getvalue()


_JSON = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "../b.safetensors"}}
_HEADER = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
SEEDS: tuple[bytes, ...] = (
    b"",
    _state_dict(),
    _zipped(
        **{"code/__torch__.py": b"class A: ...", "constants.pkl": b"\x80\x02).", "data.pkl": b"."}
    ),
    _zipped(**{"models/model.json": b"{}", "data/weights/weight_0": bytes(16)}),
    _zipped(**{"data/aotinductor/model/x_metadata.json": b'{"AOTI_DEVICE_KEY": "cpu"}'}),
    pickle.dumps({"w": [1, 2.5, "text", None, print]}, protocol=2),
    pickle.dumps({"w": [1, 2.5, "text", None, print]}, protocol=4),
    len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(8),
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    b"<!DOCTYPE html><html></html>",
    json.dumps(_JSON).encode(),
    b'\x02{"ids": {"value": 0, "side": "right", "multiple_of": 8, "mask": "m", "outputs": ["y"]}}',
    b"\x03freeze,channels_last,bf16",
    b"\x041,2,4,8",
    _CONFIG,
    _SOURCE,
    _archived(),
)
