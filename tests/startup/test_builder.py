"""Building an engine from a config."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import build
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.config.threads import Threads
from torch_py_backend.engine.weight_watcher import WeightWatcher
from torch_py_backend.startup import builder

_NET = """
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        return x + 1
"""


_WITH_WEIGHTS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.b
"""


def _build(config: ModelConfig) -> Any:
    return builder.build(config, Threads(torch.get_num_threads(), torch.get_num_interop_threads()))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {},
            "inference mode on; JIT switches unset; torch.compile off; warm-up on",
        ),
        (
            {
                "inference_mode": False,
                "enable_jit_executor": False,
                "torch_compile_optional_parameters": {},
                "optimize": ("channels_last", "bf16"),
                "warmup": False,
            },
            (
                "inference mode off; JIT switches ENABLE_JIT_EXECUTOR off; torch.compile {};"
                " OPTIMIZE channels_last, bf16; warm-up off"
            ),
        ),
    ],
    ids=["defaults", "options"],
)
@pytest.mark.usefixtures("process", "dynamo")
def test_in_effect(options: dict[str, Any], parts: str, tmp_path: Path) -> None:
    """`in_effect` names the artifact, the device, the threads and the switches of an instance."""
    build.write(tmp_path, "model.py", _NET)
    engine = _build(build.config(tmp_path, **options))
    assert builder.summary(engine, Threads(2, 3)) == (
        "model 'digits': instance digits_0_0 serves model.py (Python source and weights) on cpu;"
        f" threads 2 intra-op, 3 inter-op; {parts}."
    )


@pytest.mark.usefixtures("process")
def test_fallback(tmp_path: Path) -> None:
    """An engine whose package does not load has the fallback's files, which are then watched."""
    build.write(tmp_path, "model.py", _NET)
    with zipfile.ZipFile(build.write(tmp_path, "model.pt2", ""), "w") as file:
        file.writestr("model/data/aotinductor/model/abc.wrapper.so", "")
    options = {"default_model_filename": "model.pt2", "fallback": "model.py"}
    engine = _build(build.config(tmp_path, **options))
    assert engine.loaded.artifact.path.name == "model.py"
    assert " serves model.py (Python source and weights) on " in builder.summary(
        engine, Threads(1, 1)
    )


@pytest.mark.usefixtures("process")
def test_files_of_a_fallback_are_guarded(tmp_path: Path) -> None:
    """What is mapped is protected: the weights of the fallback, not the package."""
    build.write(tmp_path, "model.py", _WITH_WEIGHTS)
    with zipfile.ZipFile(build.write(tmp_path, "model.pt2", ""), "w") as file:
        file.writestr("model/data/aotinductor/model/abc.wrapper.so", "")
    save_file({"b": torch.ones(1)}, tmp_path / "1" / "model.safetensors")
    options = {"default_model_filename": "model.pt2", "fallback": "model.py"}
    watcher = WeightWatcher(_build(build.config(tmp_path, **options)))
    assert watcher._guard is not None
    assert [file.path.name for file in watcher._guard._files] == ["model.safetensors"]
    watcher.close()


class Echo(nn.Module):
    """Takes and returns strings in every way that TorchScript allows."""

    def forward(
        self, x: list[str], n: int = 2
    ) -> tuple[list[str], torch.Tensor, str, list[list[str]]]:
        lengths = torch.tensor([len(text) for text in x])
        return [text + "!" for text in x], lengths, str(n), [[text, text] for text in x]

    @torch.jit.export
    def shout(self, x: list[str]) -> list[str]:
        return [text + "?" for text in x]


OUTPUTS = (
    build.spec("OUTPUT__0", "BYTES", (1,)),
    build.spec("OUTPUT__1", "INT64", (1,)),
    build.spec("OUTPUT__3", "BYTES", (2,)),
)


@pytest.mark.parametrize("optimize", [(), ("freeze",)], ids=["plain", "frozen"])
@pytest.mark.parametrize("first", [b"text", b"\xff\x00x"], ids=["UTF-8", "other bytes"])
def test_torchscript_with_bytes(tmp_path: Path, first: bytes, optimize: tuple[str, ...]) -> None:
    """Bytes that are not UTF-8 pass through TorchScript unchanged."""
    (tmp_path / "1").mkdir()
    torch.jit.script(Echo().eval()).save(tmp_path / "1" / "model.pt")
    inputs = (build.spec("x", "BYTES", (1,)),)
    settings = build.config(tmp_path, inputs=inputs, outputs=OUTPUTS, optimize=optimize)
    sent = np.array([[first], ["é".encode()]], dtype=np.object_)
    engine = _build(settings)
    module: Any = engine.runner.module
    assert module.original_name == "Echo"  # hooks may use attributes of the module
    for _ in range(2):
        (outcome,) = engine.run([{"x": sent}])
        assert _bytes(outcome["OUTPUT__0"]) == [first + b"!", "é!".encode()]
        assert outcome["OUTPUT__1"].flatten().tolist() == [len(first), 2]
        assert _bytes(outcome["OUTPUT__3"]) == [first, first, "é".encode(), "é".encode()]


def test_a_torchscript_method_with_bytes(tmp_path: Path) -> None:
    """The method that METHOD names takes bytes, too."""
    (tmp_path / "1").mkdir()
    torch.jit.script(Echo().eval()).save(tmp_path / "1" / "model.pt")
    specs = {"inputs": (build.spec("x", "BYTES", (1,)),), "outputs": OUTPUTS[:1]}
    sent = np.array([[b"\xff"]], dtype=np.object_)
    (outcome,) = _build(build.config(tmp_path, method="shout", **specs)).run([{"x": sent}])
    assert _bytes(outcome["OUTPUT__0"]) == [b"\xff?"]


def _bytes(strings: Any) -> list[bytes]:
    return [
        text if isinstance(text, bytes) else text.encode() for text in strings.flatten().tolist()
    ]
