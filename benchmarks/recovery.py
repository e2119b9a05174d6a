"""The time that a model is away after kill -9 of its instance, beyond the time of its load.

    python -m benchmarks.recovery [--rounds 10] [--output docs/reliability.md]

The server is run by `torch-py-backend serve`. In turn, the model is unloaded and loaded through
Triton's API, which is timed; and its instance is killed, and requests are sent until one is
answered. Meanwhile another model gets constant requests, whose failures are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import tritonclient.grpc
from rich.console import Console
from tritonclient.utils import InferenceServerException

from benchmarks import harness
from benchmarks.tables import markdown, spread, write_table

_CODE = """\
from torch import Tensor, nn


class Negative(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x
"""
_CONFIG = """\
backend: "pytorch_py"
max_batch_size: 8
input [{{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }}]
output [{{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }}]
instance_group [{{ kind: KIND_CPU count: {count} }}]
"""
# Name, and how many instances.
_VICTIMS = {"one": 1, "two": 2}
_OTHER = "other"
_LONGEST_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, help="a file whose table is replaced, or appended")
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, count in {**_VICTIMS, _OTHER: 1}.items():
            config = _CONFIG.format(count=count)
            harness.write_model(Path(folder, name), config, {"model.py": _CODE})
        # More kills than a model should ever need.
        with harness.supervised(Path(folder), "--restarts=100000") as (process, address, _):
            text = _measure(psutil.Process(process.pid), address, settings.rounds)
    print(text)
    if settings.output is not None:
        write_table(settings.output, "recovery", text)


def _measure(serve: psutil.Process, address: str, rounds: int) -> str:
    other = _Other(address)
    rows = []
    for name, count in _VICTIMS.items():
        loads, recoveries = [], []
        with (
            Console(stderr=True).status(name),
            tritonclient.grpc.InferenceServerClient(address) as client,
        ):
            for _ in range(rounds):
                loads.append(_load(client, name, serve))
                recoveries.append(_recovery(client, name, serve))
                time.sleep(1.0)  # the machine comes to rest
        beyond = [away - load for away, load in zip(recoveries, loads, strict=True)]
        figures = [spread(seconds).text(2) for seconds in (loads, recoveries, beyond)]
        rows.append((str(count), str(rounds), *figures))
    other.end()
    summary = (
        f"Seconds: median (least..most). Of {other.answers:,} requests to another model"
        f" meanwhile, {other.failures} failed. {os.cpu_count()} cores."
    )
    columns = ("instances", "kills", "load", "kill -9 to first good answer", "beyond the load")
    return f"{markdown(columns, rows)}\n\n{summary}"


def _load(
    client: tritonclient.grpc.InferenceServerClient, name: str, serve: psutil.Process
) -> float:
    client.unload_model(name)
    _until(lambda: not _instances(serve, name))
    # `serve` notices that a user unloaded the model.
    time.sleep(1.0)
    start = time.monotonic()
    client.load_model(name)
    _ask(client, name)
    seconds = time.monotonic() - start
    _until(lambda: len(_instances(serve, name)) == _VICTIMS[name])
    time.sleep(1.0)
    return seconds


def _recovery(
    client: tritonclient.grpc.InferenceServerClient, name: str, serve: psutil.Process
) -> float:
    old = _instances(serve, name)
    start = time.monotonic()
    old[0].kill()
    # The other of two instances may still answer for a moment: both must be new.
    _until(lambda: _answers(client, name) and not {*old} & {*_instances(serve, name)})
    return time.monotonic() - start


def _answers(client: tritonclient.grpc.InferenceServerClient, name: str) -> bool:
    with contextlib.suppress(InferenceServerException):
        _ask(client, name)
        return True
    return False


def _ask(client: tritonclient.grpc.InferenceServerClient, name: str) -> None:
    tensor = tritonclient.grpc.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), dtype=np.float32))
    if client.infer(name, [tensor]).as_numpy("y").tolist() != [[-1.0] * 4]:
        raise SystemExit("a wrong answer")


def _instances(serve: psutil.Process, name: str) -> list[psutil.Process]:
    stubs = []
    for child in serve.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process is ending
            words = " ".join(child.cmdline()[:2])
            if "_backend_stub " in words and f"/{name}/" in words:
                stubs.append(child)
    return stubs


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _LONGEST_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the server did not heal")
        time.sleep(0.01)


class _Other:
    """Another model under constant requests."""

    def __init__(self, address: str) -> None:
        self.answers = self.failures = 0
        self._address, self._stop = address, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with tritonclient.grpc.InferenceServerClient(self._address) as client:
            for _ in itertools.takewhile(lambda _: not self._stop.wait(0.01), itertools.count()):
                self.failures += not _answers(client, _OTHER)
                self.answers += 1

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


if __name__ == "__main__":
    main()
