"""Traces of torch.profiler: what a model does in some batches, with a range for each stage.

While nothing is recorded nothing stands around the stages. They are replaced when it begins, in the
thread that runs the model, and put back when it ends.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function

from torch_py_backend import assembly, config, streams, threads, trial, tuned, warmup
from torch_py_backend.batching import Item, Outcome
from torch_py_backend.config import ModelConfig
from torch_py_backend.engine import Engine
from torch_py_backend.errors import (
    BackendError,
    ConfigError,
    LoadError,
    OutputError,
    WarmupError,
    brief,
)

log = logging.getLogger(__name__)

# What ranges are called; operators' names begin otherwise.
PREFIX = "stage::"
_BATCH = f"{PREFIX}batch"
# What is recorded as a batch by who records, and what is no stage of the model's.
_BARE = ("run", "streamed", "hook")
_BATCHES = 10
_POLL_S = 0.5
_AGAIN = "again"
_MOST_OPERATORS = 15
_MS = 1e-3


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


# --- while it serves ---------------------------------------------------------------------------


def refuse_unwritable(settings: ModelConfig) -> None:
    """Find out before a model is loaded whether its traces can be written.

    Raises:
        ConfigError: PROFILE_DIR is no folder that can be written to.
    """
    if settings.options.profile_dir is None:
        return
    folder = Path(settings.options.profile_dir)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            settings.name,
            f"PROFILE_DIR is '{folder}', which cannot be written to: {error.strerror or error}",
            expected="a folder that is there, and that the server's user may write to",
        ) from None


class Profiles:
    """Traces of an instance that serves: of its next batches, and again when the folder says so.

    Of a decoupled model a batch is a call of its code.
    """

    def __init__(self, engine: Engine) -> None:
        options = engine.config.options
        assert options.profile_dir is not None  # noqa: S101  else there are none
        self._engine = engine
        self._folder = Path(options.profile_dir)
        self._batches = options.profile_batches or _BATCHES
        self._left = 0
        self._recording: Recording | None = None
        self._disarm: Callable[[], None] | None = None
        # What stands around the batches is put there by one thread, and taken away by another.
        self._turn = threading.Lock()
        self._ended = threading.Event()
        self._writer: threading.Thread | None = None
        self._seen = self._touched()
        with profile():  # its own preparations are not to be waited for by a request
            pass
        self._arm()
        self._watcher = threading.Thread(target=self._watch, name="profiles", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """End it; what has not all its batches is not written. To call it twice is no error."""
        self._ended.set()
        self._watcher.join()
        recording, self._recording = self._recording, None
        if recording is not None:
            with contextlib.suppress(RuntimeError):  # another thread's, which has ended
                recording.stop()
        if self._disarm is not None:
            self._disarm()
            self._disarm = None
        if self._writer is not None:
            self._writer.join()

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            now = self._touched()
            if now != self._seen and self._disarm is None:
                self._seen = now
                if now:
                    self._arm()

    def _touched(self) -> int:
        """When somebody asked for a trace."""
        try:
            return (self._folder / _AGAIN).stat().st_mtime_ns
        except OSError:
            return 0

    def _arm(self) -> None:
        with self._turn:
            self._left = self._batches
            self._disarm = self._engine.surround(self._around)

    def _around(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if stage == "streamed" and self._engine.config.decoupled:
            return self._streamed(function)
        if stage == "run" and not self._engine.config.decoupled:
            return self._run(function)
        return function

    def _run(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(items: Sequence[Item]) -> Any:
            with self._batch():
                return function(items)

        return run

    def _streamed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def calling() -> Iterator[None]:
            with self._batch(), function():
                yield

        return calling

    @contextlib.contextmanager
    def _batch(self) -> Iterator[None]:
        """One batch is recorded; whatever is wrong with that does a request no harm."""
        if self._recording is None:
            try:
                self._recording = Recording(self._engine)
            except Exception as error:  # the model's own code profiles, say
                self._left = 1
                self._told("cannot be begun", error)
        try:
            with record_function(_BATCH):
                yield
        finally:
            self._left -= 1
            if self._left == 0:
                self._finish()

    def _finish(self) -> None:
        recording, self._recording = self._recording, None
        with self._turn:
            disarm = self._disarm
        if disarm is not None:
            disarm()
        if recording is not None:
            try:
                recorded = recording.stop()
            except Exception as error:
                self._told("cannot be ended", error)
            else:
                self._writer = threading.Thread(target=self._write, args=(recorded,), name="trace")
                self._writer.start()
        self._disarm = None

    def _write(self, recorded: profile) -> None:
        config = self._engine.config
        # An instance of another version has the same name.
        name = f"{config.instance}-{config.version}-{time.strftime('%Y%m%d-%H%M%S')}.json.gz"
        path = self._folder / name
        try:
            write(recorded, path)
        except Exception as error:
            self._told("cannot be written", error)
        else:
            log.info(
                "model '%s': %d batches were profiled: %s; https://ui.perfetto.dev opens it.",
                config.name,
                self._batches,
                path,
            )

    def _told(self, what: str, error: Exception) -> None:
        log.error(
            "model '%s': a trace of the profiler %s: %s.",
            self._engine.config.name,
            what,
            brief(error),
        )


# --- without a server --------------------------------------------------------------------------


def run(
    arguments: Mapping[str, str],
    batches: int,
    requests: int | None,
    inputs: str | None,
    output: str,
    *,
    memory: bool,
) -> dict[str, Any]:
    """Load a model as a server would, and profile batches; run in a child process.

    Args:
        arguments: what Triton passes to `initialize`.
        batches: how many batches are recorded.
        requests: how many requests of a row each are in a batch; None: as many as Triton batches.
        inputs: a file of safetensors with inputs by name; None: examples, else made-up values.
        output: where the trace is written.
        memory: whether it tells of allocations.

    Returns:
        What was found, as JSON.

    Raises:
        LoadError: the model cannot be run, or the inputs do not fit it.
    """
    settings = tuned.apply(config.parse(arguments))
    made = assembly.build(settings, threads.budget(settings))
    settings = made.config  # with the controls of a sequence that the model takes
    item, source = trial.find_inputs(settings, inputs)
    items = _requests(settings, item, requests)
    call = streams.trial(made) if settings.decoupled else made.run
    # As an instance's thread, which is in this mode all its life.
    with torch.inference_mode() if settings.options.inference_mode else contextlib.nullcontext():
        if settings.options.warmup:
            warmup.run(made)
        with profile():  # the first time of a shape, and of the profiler, is not what is asked for
            _called(made, call, items)
        recording = Recording(made, memory=memory)
        for _ in range(batches):
            with record_function(_BATCH):
                _called(made, call, items)
        recorded = recording.stop()
    made.leave()
    try:
        write(recorded, Path(output))
    except OSError as error:
        raise LoadError(
            settings.name, f"the trace cannot be written: {error.strerror or error}"
        ) from None
    return {
        "inputs": source,
        "requests": len(items),
        "device": str(made.device),
        "stages": _stages(recorded),
        "operators": _operators(recorded),
    }


def _requests(settings: ModelConfig, item: Item, count: int | None) -> list[Item]:
    """Requests of a row each; without a batch dimension a request is a batch."""
    most = settings.max_batch_size
    if count is None:
        count = 1 if settings.decoupled else max(1, most)
    if count > max(1, most):
        raise ConfigError(
            settings.name,
            f"a batch of {count} is asked for, and max_batch_size is {most}",
            expected=f"--batch-size of at most {max(1, most)}",
        )
    whole = trial.tile(settings, item, count)
    if not most:
        return [whole]
    return [{name: value[at : at + 1] for name, value in whole.items()} for at in range(count)]


def _called(
    made: Engine, call: Callable[[Sequence[Item]], Sequence[Outcome]], items: Sequence[Item]
) -> None:
    error = next((one for one in call(items) if isinstance(one, BackendError)), None)
    if isinstance(error, LoadError | OutputError):
        raise error
    if error is not None:
        raise WarmupError(made.config.name, f"a batch of {len(items)} failed: {error}")


def _stages(recorded: profile) -> list[dict[str, Any]]:
    """The ranges, in the order in which they began, each within those above it.

    Returns:
        For each its name, depth, calls and milliseconds, those within it included.
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    ranges = [one for one in recorded.events() or () if _is_range(one)]
    for one in sorted(ranges, key=lambda one: one.time_range.start):
        place = _place(one)
        row = found.setdefault(
            place, {"stage": place[-1], "depth": len(place) - 1, "calls": 0, "ms": 0.0}
        )
        row["calls"] += 1
        row["ms"] += one.time_range.elapsed_us() * _MS
    # Beneath what they are within, wherever that stands.
    order = list(found)
    return [found[place] for place in sorted(order, key=lambda place: _rank(order, place))]


def _rank(order: Sequence[tuple[str, ...]], place: tuple[str, ...]) -> list[int]:
    return [order.index(place[: end + 1]) for end in range(len(place))]


def _is_range(event: Any) -> bool:
    # On a GPU the range of a stage is a second event, of the device's.
    return bool(event.name.startswith(PREFIX) and event.device_type.name == "CPU")


def _place(event: Any) -> tuple[str, ...]:
    """The names of the ranges that a range is within, and its own."""
    names: list[str] = []
    while event is not None:
        if event.name.startswith(PREFIX):
            names.append(event.name.removeprefix(PREFIX))
        event = event.cpu_parent
    return tuple(reversed(names))


def _operators(recorded: profile) -> list[dict[str, Any]]:
    """The operators that took longest, by the device's own time where there is one."""
    rows = [
        {
            "operator": one.key,
            "calls": one.count,
            "self_ms": one.self_cpu_time_total * _MS,
            "device_ms": one.self_device_time_total * _MS,
            "memory_mb": one.self_cpu_memory_usage / (1 << 20),
        }
        for one in recorded.key_averages()
        if not one.key.startswith(PREFIX)
    ]
    key = "device_ms" if any(row["device_ms"] for row in rows) else "self_ms"
    return sorted(rows, key=lambda row: -row[key])[:_MOST_OPERATORS]
