from __future__ import annotations

from pathlib import Path
from typing import Any

import build
import models
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.config.threads import Threads
from torch_py_backend.engine import load
from torch_py_backend.errors import ForwardError
from torch_py_backend.loading.loaded import Loaded


def _build(config: ModelConfig) -> Any:
    return load.build(config, Threads(torch.get_num_threads(), torch.get_num_interop_threads()))


@pytest.mark.usefixtures("process")
def test_gpu_of_a_model_that_places_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made current: each call ends by selecting the current GPU, which takes memory of it."""
    build.write(tmp_path, "model.py", models.source(models.Negate))
    second = torch.device("cuda", 1)
    selected: list[torch.device] = []
    with FakeTensorMode():  # it stands for a GPU
        weights = [torch.empty(1, device=second)]
    monkeypatch.setattr(Loaded, "weights", property(lambda _: iter(weights)))
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    _build(build.config(tmp_path, kind="MODEL"))
    assert selected == [second]


class Echo(nn.Module):
    def forward(self, x: list[str]) -> tuple[torch.Tensor, list[str]]:
        lengths = torch.tensor([len(text) for text in x])
        return lengths, [text if len(text) < 3 else "long" for text in x]


@pytest.mark.parametrize("optimize", [(), ("freeze",)], ids=["plain", "frozen"])
def test_torchscript_with_bytes(optimize: tuple[str, ...], tmp_path: Path) -> None:
    """TorchScript takes strings of any bytes; a request for which it returns them is refused."""
    (tmp_path / "1").mkdir()
    torch.jit.script(Echo().eval()).save(tmp_path / "1" / "model.pt")
    outputs = (build.spec("OUTPUT__0", "INT64", (1,)), build.spec("OUTPUT__1", "BYTES", (1,)))
    inputs = (build.spec("x", "BYTES", (1,)),)
    engine = _build(build.config(tmp_path, optimize=optimize, inputs=inputs, outputs=outputs))
    module: Any = engine.loaded.module
    assert module.original_name == "Echo"  # hooks may use attributes of the module
    items: list[Any] = [
        {"x": np.array([[text]], dtype=np.object_)}
        for text in (b"\xff\x00x", b"\xff", "é".encode())
    ]
    long, refused, text = engine.run(items)
    assert long["OUTPUT__0"].tolist() == [[3]]
    assert long["OUTPUT__1"].tolist() == [["long"]]
    assert isinstance(refused, ForwardError)
    assert "forward() raised UnicodeDecodeError" in str(refused)
    assert text["OUTPUT__1"].tolist() == [["é"]]
