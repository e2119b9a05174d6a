"""Parsers of nearly real artifacts, configs and parameters: they understand or refuse, no more.

`make fuzz` tries more of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import build
import pytest
import safetensors.torch
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from torch_py_backend.config import options, pbtxt
from torch_py_backend.errors import LoadError
from torch_py_backend.loading import discovery
from torch_py_backend.model_folders.artifact_files import unpack_archive

_KEYS = list(options.TABLE)


def _artifact(path: Path) -> None:
    """What is known of a model before it is loaded."""
    discovery.aoti_metadata(path)
    discovery.members(path)
    discovery.find(build.config(path.parents[1]))


def _index(path: Path) -> None:
    """The files that an index of weights names."""
    model = path.with_name("model.py")
    model.touch()
    discovery.source_files(model)


def _option(path: Path) -> None:
    """One parameter of config.pbtxt, chosen by the first byte."""
    first, *text = path.read_bytes() or b"\0"
    key = _KEYS[first % len(_KEYS)]
    options.parse({key: {"string_value": bytes(text).decode(errors="replace")}})


def _archive(path: Path) -> None:
    """An archive of TorchServe: unpacked within its folder, or refused."""
    try:
        unpack_archive(path, path.with_name("unpacked"))
    finally:
        assert {other.name for other in path.parent.iterdir()} <= {path.name, "unpacked"}


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


def _zipped(members: dict[str, bytes], folder: str = "model/") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{folder}{name}", data)
    return buffer.getvalue()


def _state_dict() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2, 3)}, buffer)
    return buffer.getvalue()


def _parameter(key: str, text: str) -> bytes:
    return bytes([_KEYS.index(key)]) + text.encode()


_JSON = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "../b.safetensors"}}
_MODEL = {"handler": "base_handler", "serializedFile": "net.pt", "configFile": "c.yaml"}
_ARCHIVE = {
    "net.pt": b"",
    "c.yaml": b"batchSize: 8\nmaxBatchDelay: 50\n",
    "MAR-INF/MANIFEST.json": json.dumps({"model": _MODEL}).encode(),
}
_SEEDS = (
    b"",
    _state_dict(),
    _zipped(
        {"code/__torch__.py": b"class A: ...", "constants.pkl": b"\x80\x02).", "data.pkl": b"."}
    ),
    _zipped({"models/model.json": b"{}", "data/weights/weight_0": bytes(16)}),
    _zipped({"data/aotinductor/model/x_metadata.json": b'{"AOTI_DEVICE_KEY": "cpu"}'}),
    pickle.dumps({"w": [1, 2.5, "text", None, print]}, protocol=2),
    pickle.dumps({"w": [1, 2.5, "text", None, print]}, protocol=4),
    safetensors.torch.save({"w": torch.zeros(2)}),
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    b"<!DOCTYPE html><html></html>",
    json.dumps(_JSON).encode(),
    _parameter("PAD", '{"ids": {"value": 0, "side": "right", "mask": "m", "outputs": ["y"]}}'),
    _parameter("PAD", "[" * 100_000),  # deeper than any parser
    _parameter("OPTIMIZE", "freeze,channels_last,bf16"),
    _parameter("BATCH_BUCKETS", "1,2,4,8"),
    _parameter("CUDA_MEMORY_FRACTION", "1e999"),
    _CONFIG,
    _SOURCE,
    _zipped(_ARCHIVE, ""),
)


# Each replaces some bytes by others; the last size cuts the rest off.
_EDITS = st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 16) | st.just(10_000), st.binary(max_size=8)),
    max_size=6,
)


def _edited(seed: bytes, edits: Sequence[tuple[int, int, bytes]]) -> bytes:
    for at, size, new in edits:
        seed = seed[:at] + new + seed[at + size :]
    return seed


def _seeds(test: Callable[..., None]) -> Callable[..., None]:
    for seed in _SEEDS:
        test = example(data=seed)(test)
    return test


@pytest.mark.parametrize(
    ("name", "parse"),
    [
        ("model.pt", _artifact),
        ("model.safetensors.index.json", _index),
        ("net.py", discovery.source_files),
        ("parameter", _option),
        ("config.pbtxt", lambda path: pbtxt.read(path.parent)),
        ("net.mar", _archive),
    ],
)
@_seeds
@given(data=st.builds(_edited, st.sampled_from(_SEEDS), _EDITS) | st.binary(max_size=200))
def test_nothing_but_a_refusal(name: str, parse: Callable[[Path], object], data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python's own parsers, about what they are given
        path = build.write(Path(folder), name, data)
        with contextlib.suppress(LoadError):
            parse(path)
