"""Instances of a real server: they load in turn, share their weights, and give everything back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import living
import numpy as np
import psutil
import pytest
import scenarios
import supervised
import torch
import tritonclient.grpc
from children import until
from serving import infer_inputs, running

from torch_py_backend.server import Server

_WIDTH = 2048
_INSTANCES = 2
# Writes down how many instances are loading.
_SOURCE = f"""
import os
import time
from pathlib import Path
from torch import nn

present = Path(__file__).parents[3] / "present"
own = present / str(os.getpid())
own.touch()
time.sleep(0.05)
with (present.parent / "counts").open("a") as file:
    file.write(f"{{len(list(present.iterdir()))}}\\n")
own.unlink()


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear({_WIDTH}, {_WIDTH})

    def forward(self, x):
        return self.linear(x)
"""
_STATE = {"linear.weight": torch.zeros(_WIDTH, _WIDTH), "linear.bias": torch.ones(_WIDTH)}


def test_instances_load_in_turn_and_share_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unload leaves nothing of them: neither processes nor regions nor files."""
    (tmp_path / "temporary").mkdir()
    scenarios.Scenario(
        "wide",
        scenarios.both(scenarios.text(_SOURCE), scenarios.safe(_STATE)),
        scenarios.config(
            {"x": [_WIDTH]},
            {"y": [_WIDTH]},
            more=f"instance_group [{{ kind: KIND_CPU count: {_INSTANCES} }}]\n",
        ),
    ).lay_out(tmp_path / "repository")
    (tmp_path / "present").mkdir()
    inputs = infer_inputs(tritonclient.grpc, {"x": np.ones((1, _WIDTH), np.float32)})
    own = tmp_path / "temporary" / f"torch-py-backend-{os.geteuid()}"
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    with (
        running(tmp_path) as server,
        tritonclient.grpc.InferenceServerClient(server.grpc_address) as client,
    ):
        assert set(client.infer("wide", inputs).as_numpy("y").flat) == {1}
        weights = _mapped(server, tmp_path / "repository" / "wide" / "1" / "model.safetensors")
        size = sum(tensor.nbytes for tensor in _STATE.values())
        assert len(weights) == _INSTANCES
        assert sum(one.pss for one in weights) <= 1.1 * size
        assert all(one.rss >= 0.9 * size for one in weights)
        assert all(one.private_dirty == 0 for one in weights)
        prefix = supervised.prefix(psutil.Process(server.process.pid))
        assert len(supervised.regions(prefix)) > _INSTANCES
        client.unload_model("wide")
        # Triton reaps a process before it gives back what they shared; its owner's file stays.
        until(lambda: not living.descendants(server.process.pid))
        until(lambda: len(supervised.regions(prefix)) == 1)
        assert [path.name for path in own.iterdir()] == ["locks"]
    counts = (tmp_path / "counts").read_text().split()
    assert counts == ["1"] * _INSTANCES


def _mapped(server: Server, path: Path) -> list[Any]:
    """What each instance has mapped of a file, in bytes."""
    processes = living.descendants(server.process.pid)
    maps = [one for process in processes for one in process.memory_maps(grouped=True)]
    return [one for one in maps if one.path == str(path)]
