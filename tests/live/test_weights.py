"""Instances of a real server: they load in turn, share their weights, and give everything back."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import living
import numpy as np
import psutil
import pytest
import scenarios
import torch
import tritonclient.grpc
from serving import infer_inputs, running, until

from torch_py_backend.server import Server

_SECONDS = 240
_WIDTH = 2048
_INSTANCES = 2
# Writes down how many instances are loading.
_SOURCE = f"""
import os
import time
from pathlib import Path
from torch import nn

present = Path(__file__).parents[2] / "present"
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


@dataclass(frozen=True)
class Served:
    """A server with the model, its client, and what the kernel knows of its instances."""

    server: Server
    folder: Path
    client: tritonclient.grpc.InferenceServerClient

    def answer(self) -> None:
        inputs = infer_inputs(tritonclient.grpc, {"x": np.ones((1, _WIDTH), np.float32)})
        assert set(self.client.infer("wide", inputs).as_numpy("y").flat) == {1}

    def instances(self) -> list[psutil.Process]:
        """Processes of the model that live; Triton reaps the others when it likes to."""
        return living.descendants(self.server.process.pid)

    def regions(self) -> set[str]:
        """Shared memory under the prefix that this server was given: others may run here."""
        words = living.command(psutil.Process(self.server.process.pid))
        prefix = re.search(r"shm-region-prefix-name=(\S+)", words)
        assert prefix is not None
        return {path.name for path in Path("/dev/shm").glob(f"{prefix[1]}*")}

    def weights(self) -> list[Any]:
        """Return what each instance has mapped of the weights, in bytes."""
        path = str(self.folder / "repository" / "wide" / "1" / "model.safetensors")
        mapped = [one for process in self.instances() for one in process.memory_maps(grouped=True)]
        return [one for one in mapped if one.path == path]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose temporary folder is its own; it has not loaded the model."""
    folder = tmp_path_factory.mktemp("weights")
    (folder / "temporary").mkdir()
    scenarios.Scenario(
        "wide",
        scenarios.both(scenarios.text(_SOURCE), scenarios.safe(_STATE)),
        scenarios.config(
            {"x": [_WIDTH]},
            {"y": [_WIDTH]},
            more=f"instance_group [{{ kind: KIND_CPU count: {_INSTANCES} }}]\n",
        ),
    ).lay_out(folder / "repository")
    (folder / "repository" / "present").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder / "temporary"))
        with running(folder, "--model-control-mode=explicit") as server:
            client = tritonclient.grpc.InferenceServerClient(server.grpc_address)
            yield Served(server, folder, client)
            client.close()


def test_load_in_turn_share_and_unload(served: Served) -> None:
    """Instances load one by one and have the weights once; an unload leaves nothing of them."""
    regions = served.regions()
    own = served.folder / "temporary" / f"torch-py-backend-{os.geteuid()}"
    for _ in range(2):
        served.client.load_model("wide")
        served.answer()
        shares = served.weights()
        size = sum(tensor.nbytes for tensor in _STATE.values())
        assert len(shares) == _INSTANCES
        assert sum(share.pss for share in shares) <= 1.1 * size
        assert all(share.rss >= 0.9 * size for share in shares)
        assert all(share.private_dirty == 0 for share in shares)
        assert len(served.regions()) >= len(regions) + _INSTANCES
        served.client.unload_model("wide")
        # Triton reaps a process before it gives back what they shared.
        until(lambda: not served.instances() and served.regions() == regions, _SECONDS)
        assert [path.name for path in own.iterdir()] == ["locks"]
    counts = (served.folder / "repository" / "counts").read_text().split()
    assert counts == ["1"] * 2 * _INSTANCES
