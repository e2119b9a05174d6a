"""Instances that share weights, each in a process; memory of the CPU takes the place of a GPU's.

Not in the file of the tests: what a process must import costs its time.
"""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import build
import children
import torch

from torch_py_backend.config.threads import Threads
from torch_py_backend.engine import load, sharing, warmup
from torch_py_backend.errors import BackendError


def _serve(pipe: Connection, folder: Path, name: str) -> None:
    """Be a complete instance, until the pipe closes.

    For each message it sends its output for ones, or the code of the error; for "double" it doubles
    its weights before.
    """
    # Descriptors are sent to processes that torch has started only.
    torch.multiprocessing.set_sharing_strategy("file_system")
    torch.ones(1).share_memory_()  # starts torch's manager, whose address is in the short TMPDIR
    children.settle(folder)
    sharing.requested = lambda config: True
    named = sharing.named
    # Memory of the CPU moves when it is sent for the first time, unlike that of a GPU.
    sharing.named = lambda module: {
        name: weight.share_memory_() for name, weight in named(module).items()
    }
    config = build.config(folder, instance=name, outputs=(build.spec("y", dims=(3,)),))
    engine = load.build(config, Threads(1, 1))
    warmup.run(engine)
    assert engine._shared is not None
    pipe.send("owns" if engine._shared.owns else "maps")
    with torch.inference_mode(), contextlib.suppress(EOFError):
        while True:
            if pipe.recv() == "double":
                for weight in engine.loaded.weights:
                    weight.mul_(2)
            (outcome,) = engine.run([{"x": torch.ones(1, 4)}])
            is_error = isinstance(outcome, BackendError)
            pipe.send(outcome.code if is_error else torch.as_tensor(outcome["y"]).tolist())


class Sharer:
    """Such an instance in a process of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.pipe, theirs = children.FORKS.Pipe()
        self.process = children.FORKS.Process(target=_serve, args=(theirs, folder, name))
        self.process.start()
        theirs.close()

    def ask(self, message: str = "") -> Any:
        self.pipe.send(message)
        return self.pipe.recv()

    def end(self) -> int | None:
        self.pipe.close()
        self.process.join()
        return self.process.exitcode
