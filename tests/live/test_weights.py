"""Weights of a real server's instances: in memory once, and given back."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import living
import numpy as np
import psutil
import pytest
import safetensors.torch
import torch
import tritonclient.grpc
from serving import infer_inputs, running, until

from torch_py_backend.server import Server

_SECONDS = 240
_WIDTH = 2048
_INSTANCES = 2
_X = np.ones((1, _WIDTH), np.float32)
_OPTIONS = f"""\
max_batch_size: 8
input [{{ name: "x" data_type: TYPE_FP32 dims: [{_WIDTH}] }}]
output [{{ name: "y" data_type: TYPE_FP32 dims: [{_WIDTH}] }}]
instance_group [{{ kind: KIND_CPU count: {_INSTANCES} }}]
"""
_SOURCE = f"""
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear({_WIDTH}, {_WIDTH})

    def forward(self, x):
        return self.linear(x)
"""


def _write(path: Path, value: float, prefix: str = "linear.") -> None:
    """Weights that make of ones `value`, in one step."""
    state = {
        f"{prefix}weight": torch.zeros(_WIDTH, _WIDTH),
        f"{prefix}bias": torch.full((_WIDTH,), value),
    }
    scratch = path.with_name("next")
    safetensors.torch.save_file(state, scratch)
    scratch.replace(path)


class Served:
    """A server with the model, its client, and what the kernel knows of its instances."""

    def __init__(self, server: Server, path: Path, log: Path, name: str = "x") -> None:
        self.server, self.path, self.log, self.name = server, path, log, name
        self.output = "y" if name == "x" else "OUTPUT__0"
        self.client = tritonclient.grpc.InferenceServerClient(server.grpc_address)

    def answer(self) -> float:
        inputs = infer_inputs(tritonclient.grpc, {self.name: _X})
        result = self.client.infer("wide", inputs).as_numpy(self.output)
        assert len(set(result.flat)) == 1, "weights of two files"
        return float(result.flat[0])

    def several(self) -> list[float]:
        """Enough answers to have some of each instance, in nearly all cases."""
        return [self.answer() for _ in range(8 * _INSTANCES)]

    def instances(self) -> list[psutil.Process]:
        """Processes of the model that live; Triton reaps the others when it likes to."""
        return living.descendants(self.server.process.pid)

    def regions(self) -> list[Path]:
        """Shared memory under the prefix that this server was given: others may run here."""
        words = living.command(psutil.Process(self.server.process.pid))
        prefix = re.search(r"shm-region-prefix-name=(\S+)", words)
        assert prefix is not None
        paths = Path("/dev/shm").glob(f"{prefix[1]}*")
        # One file names their owner.
        return [path for path in paths if not path.name.endswith("_owner")]

    def mapped(self, pid: int) -> dict[str, int]:
        """What smaps says of the file in one process, in bytes, summed over its mappings."""
        found: dict[str, int] = {}
        inside = False
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                inside = line.endswith(str(self.path))
            elif inside and words[-1] == "kB":
                key = words[0].rstrip(":")
                found[key] = found.get(key, 0) + int(words[1]) * 1024
        return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("weights")) as made:
        yield made


@pytest.fixture
def served(shared: Served) -> Served:
    """The server, each of whose instances answers 1."""
    assert set(shared.several()) == {1}
    return shared


@contextlib.contextmanager
def serving(tmp_path: Path) -> Iterator[Served]:
    """A server with the model."""
    folder = tmp_path / "repository" / "wide"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "pytorch_py"\n' + _OPTIONS)
    (folder / "1" / "model.py").write_text(_SOURCE)
    path = folder / "1" / "model.safetensors"
    _write(path, 1)
    with running(tmp_path, "--model-control-mode=explicit", "--load-model=wide") as server:
        made = Served(server, path, tmp_path / "server.log")
        yield made
        made.client.close()


def test_instances_have_the_weights_once(served: Served) -> None:
    """Their shares of the file add up to its size, and none has a page of its own."""
    _assert_shared(served)


def _assert_shared(served: Served) -> None:
    size = served.path.stat().st_size
    shares = [served.mapped(one.pid) for one in served.instances()]
    assert len(shares) == _INSTANCES
    assert sum(share["Pss"] for share in shares) <= 1.1 * size
    assert all(share["Rss"] >= 0.9 * size for share in shares)
    assert all(share["Private_Dirty"] == 0 for share in shares)


def test_unload_gives_everything_back(served: Served) -> None:
    """No process, no shared memory, no mapping of the file is left; and it can be loaded again."""
    regions = len(served.regions())
    assert regions >= _INSTANCES
    for _ in range(2):
        served.client.unload_model("wide")
        # Triton reaps a process before it gives back what they shared.
        until(lambda: not served.instances() and not served.regions(), _SECONDS)
        served.client.load_model("wide")
        assert served.answer() == 1
        assert len(served.instances()) == _INSTANCES
    assert len(served.regions()) == regions
