"""Traces of torch.profiler with a range for each stage of an engine.

`Recording` records one trace, `write` saves it, and `LiveProfiler` does both for an instance that
serves (option PROFILE_DIR). The stages are instrumented only while a trace is recorded.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function

from torch_py_backend import files
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import ConfigError, summarize

log = logging.getLogger(__name__)

# The prefix of the ranges' names. No operator's name begins with it.
PREFIX = "stage::"
# These stages get no range: `batch()` covers "run" and "streamed", and each method of a hook has
# a range of its own.
_WITHOUT_RANGE = ("run", "streamed", "hook")
_DEFAULT_BATCHES = 10
_POLL_S = 0.5
# The file in PROFILE_DIR whose modification time starts another trace.
_TRIGGER = "again"


def batch() -> record_function:
    """Return the range of a whole batch."""
    return record_function(f"{PREFIX}batch")


class Recording:
    """A running profile of an engine.

    Create and stop it in the thread that runs the model.
    """

    def __init__(self, engine: Engine, *, memory: bool = False) -> None:
        self._profiler = profile(profile_memory=memory)
        self._profiler.start()
        self._restore = engine.instrument(_with_range)

    def stop(self) -> profile:
        """Remove the ranges, stop the profiler and return it."""
        self._restore()
        self._profiler.stop()
        return self._profiler


def _with_range(stage: str, function: Callable[..., object]) -> Callable[..., object]:
    if stage in _WITHOUT_RANGE:
        return function
    label = PREFIX + stage

    def call(*args: object, **kwargs: object) -> object:
        with record_function(label):
            return function(*args, **kwargs)

    return call


def write(profiler: profile, path: Path) -> None:
    """Write a trace atomically, as JSON; compressed if the name ends in .gz.

    Raises:
        OSError: it cannot be written.
    """
    # In a directory with a random name: other users may have put links into a shared one.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".profile-") as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        # The profiler does not report a full disk; it may leave no file at all.
        with trace.open("a+b") as file:
            file.seek(max(0, file.tell() - 16))
            if not file.read().rstrip().endswith(b"}"):
                raise OSError(None, "the trace was not written to its end")
        if path.suffix == ".gz":
            compressed = Path(folder) / "trace.json.gz"
            with trace.open("rb") as source, gzip.open(compressed, "wb") as target:
                shutil.copyfileobj(source, target)
            trace = compressed
        trace.replace(path)


# --- an instance that serves -----------------------------------------------------------------


def check_writable(config: ModelConfig) -> None:
    """Check, before the model is loaded, that PROFILE_DIR is a writable directory.

    Raises:
        ConfigError: it is not.
    """
    if config.options.profile_dir is None:
        return
    folder = Path(config.options.profile_dir)
    try:
        files.check_writable(folder)
    except OSError as error:
        raise ConfigError(
            config.name,
            f"PROFILE_DIR is '{folder}', which cannot be written to: {error.strerror or error}",
            expected="an existing folder that the server's user may write to",
        ) from None


class LiveProfiler:
    """Records the first batches of an instance that serves, and more when `again` is touched.

    For a decoupled model, each call of its code counts as a batch.
    """

    def __init__(self, engine: Engine) -> None:
        options = engine.config.options
        assert options.profile_dir is not None  # noqa: S101  checked by the caller
        self._engine = engine
        self._folder = Path(options.profile_dir)
        self._batches = options.profile_batches or _DEFAULT_BATCHES
        # The watcher's thread instruments and restores the stages. The model's thread records, and
        # sets `_remaining` to 0 last.
        self._remaining = 0
        self._recording: Recording | None = None
        self._recorded: profile | None = None
        self._restore: Callable[[], None] | None = None
        self._closing = threading.Event()
        self._triggered_at = self._trigger_time()
        with profile():  # the first profile initializes the profiler: not during a request
            pass
        self._arm()
        self._watcher = threading.Thread(target=self._watch, name="profiles", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Stop profiling and discard an incomplete trace. Closing twice is allowed."""
        self._closing.set()
        self._watcher.join()
        recording, self._recording = self._recording, None
        if recording is not None:
            with contextlib.suppress(RuntimeError):  # started by a thread that has ended
                recording.stop()
        self._disarm()

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_S):
            triggered_at = self._trigger_time()
            if self._remaining == 0:
                self._disarm()
                if triggered_at != self._triggered_at and triggered_at:
                    self._arm()
                self._triggered_at = triggered_at

    def _trigger_time(self) -> int:
        """Return the modification time of the trigger file, in ns; 0 if there is none."""
        try:
            return (self._folder / _TRIGGER).stat().st_mtime_ns
        except OSError:
            return 0

    def _arm(self) -> None:
        """Record the next batches."""
        self._remaining = self._batches
        self._restore = self._engine.instrument(self._with_recording)

    def _disarm(self) -> None:
        """Restore the stages, and write what was recorded."""
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()
        profiler, self._recorded = self._recorded, None
        if profiler is not None:
            self._write(profiler)

    def _with_recording(self, stage: str, function: Callable[..., Any]) -> Callable[..., object]:
        @contextlib.contextmanager
        def streamed() -> Iterator[None]:
            with self._batch(), function():
                yield

        decoupled = self._engine.config.decoupled
        if stage == "run" and not decoupled:
            return self._batch()(function)
        return streamed if stage == "streamed" and decoupled else function

    @contextlib.contextmanager
    def _batch(self) -> Iterator[None]:
        """Record one batch. Errors of the profiler are logged and do not fail the request."""
        if self._remaining == 0:  # until the stages are restored
            yield
            return
        if self._recording is None:
            try:
                self._recording = Recording(self._engine)
            except Exception as error:  # the model's code uses the profiler itself, for example
                self._remaining = 1
                self._log_error("cannot be started", error)
        try:
            with batch():
                yield
        finally:
            if self._remaining == 1:
                self._stop()
            self._remaining -= 1

    def _stop(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            try:
                self._recorded = recording.stop()
            except Exception as error:
                self._log_error("cannot be stopped", error)

    def _write(self, profiler: profile) -> None:
        config = self._engine.config
        # Instances of two versions have the same name.
        name = f"{config.instance}-{config.version}-{time.strftime('%Y%m%d-%H%M%S')}.json.gz"
        path = self._folder / name
        try:
            write(profiler, path)
        except Exception as error:
            self._log_error("cannot be written", error)
        else:
            log.info(
                "model '%s': %d batches were profiled: %s; https://ui.perfetto.dev opens it.",
                config.name,
                self._batches,
                path,
            )

    def _log_error(self, problem: str, error: Exception) -> None:
        log.error(
            "model '%s': a trace of the profiler %s: %s.",
            self._engine.config.name,
            problem,
            summarize(error),
        )
