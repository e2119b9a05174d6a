"""A config becomes an engine, or nothing stays of what was loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import build
import pytest
import torch
from torch import nn

from torch_py_backend import assembly, loaders, signatures
from torch_py_backend.artifacts import Kind
from torch_py_backend.config import ModelConfig
from torch_py_backend.errors import BackendError, BindingError
from torch_py_backend.loaders import Loaded
from torch_py_backend.threads import Threads

_NET = """
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        return x + 1
"""


def _build(config: ModelConfig) -> Any:
    return assembly.build(config, Threads(torch.get_num_threads(), torch.get_num_interop_threads()))


def test_what_lies_in_the_folder_is_served(tmp_path: Path) -> None:
    """The artifact of the version folder answers."""
    build.write(tmp_path, "model.py", _NET)

    (outcome,) = _build(build.config(tmp_path)).run([{"x": torch.zeros(1, 4)}])

    assert outcome["y"].tolist() == [[1.0] * 4]


def test_what_cannot_become_an_engine_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that loads, and does not fit its config, lets go of what it holds elsewhere."""
    build.write(tmp_path, "model.py", _NET)
    left = []

    def load(*_: Any) -> Loaded:
        module = nn.Linear(4, 4)
        signature = signatures.of_function(module.forward)
        return Loaded(Kind.MODULE, module, signature, module, leave=lambda: left.append(True))

    monkeypatch.setattr(loaders, "load", load)
    settings = build.config(tmp_path, inputs=(build.spec("x"), build.spec("y"), build.spec("z")))
    with pytest.raises(BackendError) as caught:
        _build(settings)

    assert isinstance(caught.value, BindingError)
    assert left == [True]
