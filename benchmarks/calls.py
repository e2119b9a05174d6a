"""What a call of a module takes in an instance: eager, torch.compile, AOTInductor.

    python -m benchmarks.calls [--turns 5] [--calls 300] [--output FILE]

One tritonserver serves each network in each way, with one thread. One request of 1 or 8 rows is in
flight; the ways take turns, A B C … C B A. A time is the stage `forward` of
`pytorch_py_stage_seconds_total` over the calls of a turn, in a real instance: it has neither the
server nor the rest of `execute()` in it. Answers are compared with PyTorch's first.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import re
import sys
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import tritonclient.grpc
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.tables import markdown, spread, write_table
from torch_py_backend.server import Server

_ROWS = (1, 8)
_WAYS = {
    "eager": {},
    "torch.compile": {"TORCH_COMPILE_OPTIONAL_PARAMETERS": "{}"},
    "aoti": {"OPTIMIZE": "aoti"},
}
_CONFIG = """\
backend: "pytorch_py"
max_batch_size: 32
input [{{ name: "x" data_type: TYPE_FP32 dims: [{dims}] }}]
output [{{ name: "y" data_type: TYPE_FP32 dims: [{width}] }}]
instance_group [{{ kind: KIND_CPU count: 1 }}]
"""
_PARAMETER = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}\n'
_TOLERANCE = 1e-4
# Metrics are published once a second.
_PUBLISHED_SECONDS = 2.5


class Mlp(nn.Module):
    """Features [batch, 64] to scores [batch, 10], through two layers of 128."""

    dims, width = (64,), 10

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


class Encoder(nn.Module):
    """Vectors of 32 tokens [batch, 32, 128] to one of the text [batch, 128]: four layers."""

    dims, width = (32, 128), 128

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=512, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=4)

    def forward(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.encoder(x)
        return encoded.mean(1)


NETWORKS: dict[str, type[Mlp | Encoder]] = {"mlp": Mlp, "encoder": Encoder}


def write(repository: Path, name: str, way: str) -> tuple[str, nn.Module]:
    """Write a network's folder; return its name on the server, and the module."""
    kind = NETWORKS[name]
    torch.manual_seed(0)
    module = kind().eval()
    served = f"{name}_{way.replace('.', '_')}"
    source = f"from torch import Tensor, nn\n\n{inspect.getsource(kind)}"
    config = _CONFIG.format(dims=", ".join(map(str, kind.dims)), width=kind.width)
    for key, value in {"NUM_THREADS": "1", **_WAYS[way]}.items():
        config += _PARAMETER.format(key, value)
    version = harness.write_model(repository / served, config, {"model.py": source})
    safetensors.torch.save_file(module.state_dict(), version / "model.safetensors")
    return served, module


def forward_seconds(server: Server, model: str) -> float:
    """Return the seconds that a model's calls have taken."""
    time.sleep(_PUBLISHED_SECONDS)
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    labels = rf'model="{model}"[^}}]*stage="forward"|stage="forward"[^}}]*model="{model}"'
    found = re.search(
        rf"^pytorch_py_stage_seconds_total{{(?:{labels})[^}}]*}} (\S+)", text, re.MULTILINE
    )
    assert found is not None, text  # noqa: S101  the backend has this metric
    return float(found[1])


def measure(turns: int, calls: int) -> list[list[str]]:
    """Return a row for each network, row count and way."""
    with harness.scratch() as scratch:
        repository = Path(scratch, "repository")
        subjects = {
            (name, way): write(repository, name, way)
            for name, way in itertools.product(NETWORKS, _WAYS)
        }
        with (
            harness.served(repository) as server,
            tritonclient.grpc.InferenceServerClient(server.grpc_address) as client,
        ):
            figures: dict[tuple[str, int, str], list[float]] = defaultdict(list)
            for name, rows in itertools.product(NETWORKS, _ROWS):
                x = np.random.default_rng(0).random((rows, *NETWORKS[name].dims), np.float32)
                sent = tritonclient.grpc.InferInput("x", list(x.shape), "FP32")
                sent.set_data_from_numpy(x)
                for way in _WAYS:
                    served, module = subjects[name, way]
                    with torch.inference_mode():
                        expected = module(torch.from_numpy(x)).numpy()
                    answer = client.infer(served, [sent]).as_numpy("y")
                    np.testing.assert_allclose(answer, expected, _TOLERANCE, _TOLERANCE)
                for turn in range(turns):
                    for way in list(_WAYS)[:: 1 if turn % 2 == 0 else -1]:
                        served = subjects[name, way][0]
                        before = forward_seconds(server, served)
                        for _ in range(calls):
                            client.infer(served, [sent])
                        taken = forward_seconds(server, served) - before
                        figures[name, rows, way].append(taken / calls * 1e6)
    table = []
    for (name, rows, way), values in figures.items():
        eager = figures[name, rows, "eager"]
        ratios = [value / other for value, other in zip(values, eager, strict=True)]
        ratio = "" if way == "eager" else spread(ratios).text(2)
        table.append([name, str(rows), way, spread(values).text(0), ratio])
    return table


def main(words: list[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--output", type=Path, help="a document with the marks of this table")
    settings = parser.parse_args(words)
    table = markdown(
        ["network", "rows", "way", "a call, µs", "÷ eager"],
        measure(settings.turns, settings.calls),
    )
    print(table)
    if settings.output is not None:
        write_table(settings.output, "calls", table)


if __name__ == "__main__":
    main(sys.argv[1:])
