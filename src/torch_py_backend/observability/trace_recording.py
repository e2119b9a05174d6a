"""What torch.profiler sees of an engine: a range for each stage, and a trace that is written whole.

While nothing is recorded nothing stands around the stages. They are replaced when it begins, in the
thread that runs the model, and put back when it ends.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function

from torch_py_backend.engine.engine import Engine

# What ranges are called; operators' names begin otherwise.
PREFIX = "stage::"
# What is no stage of the model's: who records has a range for a batch.
_BARE = ("run", "streamed", "hook")


def batch() -> record_function:
    """The range of a whole batch."""
    return record_function(f"{PREFIX}batch")


def _ranged(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A stage as a range of the profiler's."""
    if stage in _BARE:
        return function
    label = PREFIX + stage

    def within(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return function(*args, **kwargs)

    return within


class Recording:
    """What the profiler sees of an engine. Begun and stopped by the thread that runs the model."""

    def __init__(self, engine: Engine, *, memory: bool = False) -> None:
        self._profiler = profile(profile_memory=memory)
        self._profiler.start()
        self._restore = engine.surround(_ranged)

    def stop(self) -> profile:
        self._restore()
        self._profiler.stop()
        return self._profiler


def write(recorded: profile, path: Path) -> None:
    """Write a trace whole or not at all: as JSON, compressed where the name ends in .gz.

    Raises:
        OSError: it cannot be written.
    """
    # Of a name that nobody can guess: in a folder that all may write to lie others' links.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".profile-") as folder:
        plain = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(plain))
        # The profiler does not tell when a disk is full.
        if not plain.is_file() or not _ends(plain):
            raise OSError(None, "the trace was not written to its end")
        if path.suffix == ".gz":
            packed = Path(folder) / "trace.json.gz"
            with plain.open("rb") as source, gzip.open(packed, "wb") as target:
                shutil.copyfileobj(source, target)
            plain = packed
        plain.replace(path)


def _ends(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16))
        return file.read().rstrip().endswith(b"}")
