"""TorchServe (archived, needs Java): `batchSize` and `maxBatchDelay` of one worker, by a handler.

https://docs.pytorch.org/serve/batch_inference_with_ts.html
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.models import MAX_BATCH_SIZE
from benchmarks.peers import wire

_MAX_BATCH_DELAY_MS = int(wire.MAX_DELAY_SECONDS * 1000)


@cache
def _forward(model: str) -> wire.Forward:
    return wire.Forward(model)


def handle(data: Sequence[Mapping[str, Any]] | None, context: Any) -> list[bytes] | None:
    """What TorchServe calls with a batch; with None, once, to load the model."""
    forward = _forward(context.manifest["model"]["modelName"])
    return None if data is None else forward([bytes(request["body"]) for request in data])


def main() -> None:
    arguments = wire.arguments()
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-torchserve-"))
    _archive(arguments.model, folder)
    served = {
        "defaultVersion": True,
        "marName": f"{arguments.model}.mar",
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": MAX_BATCH_SIZE,
        "maxBatchDelay": _MAX_BATCH_DELAY_MS,
    }
    properties = {
        "inference_address": f"http://127.0.0.1:{arguments.port}",
        "management_address": f"http://127.0.0.1:{wire.free_port()}",
        "metrics_address": f"http://127.0.0.1:{wire.free_port()}",
        "grpc_inference_port": wire.free_port(),
        "grpc_management_port": wire.free_port(),
        "disable_token_authorization": "true",
        "model_store": folder,
        "load_models": f"{arguments.model}.mar",
        "models": json.dumps({arguments.model: {"1.0": served}}),
    }
    config = folder / "config.properties"
    config.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
    command = str(Path(sys.executable).with_name("torchserve"))
    # TorchServe starts `python` and writes its logs where it is started.
    os.environ["PATH"] = os.pathsep.join([str(Path(command).parent), os.environ["PATH"]])
    os.environ["PYTHONPATH"] = str(Path.cwd())
    os.chdir(folder)
    os.execv(command, [command, "--foreground", "--ts-config", str(config)])


def _archive(model: str, folder: Path) -> None:
    """A model archive with this file as its handler."""
    import subprocess  # noqa: PLC0415  not in the handler's process

    archiver = Path(sys.executable).with_name("torch-model-archiver")
    options = ["--model-name", model, "--version", "1.0", "--handler", __file__]
    command = [str(archiver), *options, "--export-path", str(folder)]
    subprocess.run(command, check=True)  # noqa: S603  the environment's own


if __name__ == "__main__":
    main()
