"""From `serve s3://…` to READY, and the bytes that the store sent for it.

    python -m benchmarks.object_store [--gigabytes 2] [--turns 3]

The store is moto's server on this machine, so that the times are those of this machine's CPU and
disk and not of a network. Each turn begins with an empty cache: one server starts cold, then one
with what is cached; four servers start at once with another empty cache. Then the store is stopped,
a model's process is killed, and the time to its next answer is measured; at last a server starts
without the store.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import psutil
import torch
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from rich.console import Console
from safetensors.torch import save_file
from werkzeug.serving import make_server

from benchmarks import harness
from benchmarks.tables import markdown, spread

_COMMAND = "from torch_py_backend.cli import app; app()"
_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--health-port=0")
_KEYS = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_DEFAULT_REGION": "us-east-1",
}
_COLUMNS = ("start", "seconds to READY", "GB from the store")
_URL = "s3://models/repository"
_CONFIG = """backend: "pytorch_py"
max_batch_size: 8
input [{ name: "row" data_type: TYPE_INT64 dims: [ 1 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 1, 1024 ] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""
_MODULE = """import torch

class Tables(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.empty(8192, 1024) for _ in range(count))

    def forward(self, row):
        return self.parts[0][row]
"""
_PART_BYTES = 8192 * 1024 * 4


class Store:
    """A server of S3 that counts the bytes that it sends."""

    def __init__(self) -> None:
        self.sent = 0
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._counted, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        os.environ.update(_KEYS, AWS_ENDPOINT_URL=f"http://127.0.0.1:{self._server.server_port}")

    def _counted(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        for part in self._app(environ, start_response):
            self.sent += len(part)
            yield part

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Serving:
    """A running `torch-py-backend serve`."""

    def __init__(self, cache: Path, log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(  # noqa: S603  this package
                [sys.executable, "-c", _COMMAND, "serve", _URL, f"--cache={cache}", *_PORTS],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, line: str) -> None:
        while not re.search(line, text := self._log.read_text(encoding="utf-8")):
            if self.process.poll() is not None:
                raise RuntimeError(text)
            time.sleep(0.01)

    def kill_model(self) -> None:
        """End the model's process, as a crash does."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "_backend_stub" in process.cmdline()[0]:
                    process.kill()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


@contextlib.contextmanager
def _serving(cache: Path, count: int = 1) -> Iterator[tuple[float, list[Serving]]]:
    """Start servers at once; yield the seconds until all models of all of them are READY."""
    start = time.perf_counter()
    servers = [Serving(cache, cache.parent / f"serve{number}.log") for number in range(count)]
    try:
        for server in servers:
            server.wait_for(r"\nserving on ")
        yield time.perf_counter() - start, servers
    finally:
        for server in servers:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    seconds: dict[str, list[float]] = {}
    sent: dict[str, list[float]] = {}
    store = Store()

    def note(start: str, took: float, before: int) -> None:
        seconds.setdefault(start, []).append(took)
        sent.setdefault(start, []).append((store.sent - before) / 1e9)

    with harness.scratch() as name:
        folder = Path(name)
        _fill(folder / "repository", arguments.gigabytes)
        for turn in range(arguments.turns):
            cache = folder / f"cache{turn}"
            for start in ("cold", "cached"):
                before = store.sent
                with _serving(cache) as (took, _):
                    note(start, took, before)
            before = store.sent
            with _serving(folder / f"cache{turn}-four", 4) as (took, _):
                note("four servers at once, cold", took, before)
        store_is_down = folder / "cache0"
        with _serving(store_is_down) as (_, (server,)):
            store.stop()
            for turn in range(arguments.turns):
                before, began = store.sent, time.perf_counter()
                server.kill_model()
                server.wait_for(rf"(serves again(.|\n)*){{{turn + 1}}}")
                note("kill -9 of the model, store down", time.perf_counter() - began, before)
        with _serving(store_is_down) as (took, _):
            note("start, store down", took, store.sent)
    rows = [
        (start, spread(seconds[start]).text(1), spread(sent[start]).text(2)) for start in seconds
    ]
    Console(soft_wrap=True).print(markdown(_COLUMNS, rows))


def _fill(repository: Path, gigabytes: float) -> None:
    """Put a model with weights of this size into the store."""
    version = repository / "tables" / "1"
    version.mkdir(parents=True)
    count = max(1, int(gigabytes * 1e9) // _PART_BYTES)
    kwargs = f'{{\\"count\\": {count}}}'
    parameter = f'parameters {{ key: "MODEL_KWARGS" value {{ string_value: "{kwargs}" }} }}\n'
    (repository / "tables" / "config.pbtxt").write_text(_CONFIG + parameter)
    (version / "model.py").write_text(_MODULE)
    # In several files: moto reads the whole of one to answer with a part of it.
    names = {f"parts.{number}": f"model-{number}.safetensors" for number in range(count)}
    for key, name in names.items():
        save_file({key: torch.rand(8192, 1024)}, version / name)
    index = {"metadata": {}, "weight_map": names}
    (version / "model.safetensors.index.json").write_text(json.dumps(index))
    files = fsspec.filesystem("s3")
    files.mkdir("models")
    files.put(str(repository), _URL.removeprefix("s3://"), recursive=True, batch_size=2)


if __name__ == "__main__":
    main()
