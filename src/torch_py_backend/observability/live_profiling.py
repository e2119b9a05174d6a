"""Traces of an instance that serves: of its next batches, and again when a folder says so."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import profile

from torch_py_backend.batching.gather_scatter import Item
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import ConfigError, brief
from torch_py_backend.observability import trace_recording
from torch_py_backend.observability.trace_recording import Recording

log = logging.getLogger(__name__)

_BATCHES = 10
_POLL_S = 0.5
_AGAIN = "again"


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
        begun, self._recording = self._recording, None
        if begun is not None:
            with contextlib.suppress(RuntimeError):  # another thread's, which has ended
                begun.stop()
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
            with trace_recording.batch():
                yield
        finally:
            self._left -= 1
            if self._left == 0:
                self._finish()

    def _finish(self) -> None:
        begun, self._recording = self._recording, None
        with self._turn:
            disarm = self._disarm
        if disarm is not None:
            disarm()
        if begun is not None:
            try:
                recorded = begun.stop()
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
            trace_recording.write(recorded, path)
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
