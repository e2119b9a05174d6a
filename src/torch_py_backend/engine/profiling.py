"""Profiles the first batches of an instance that serves (option PROFILE_DIR)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from torch.profiler import profile, record_function, schedule, tensorboard_trace_handler

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import summarize

log = logging.getLogger(__name__)

# The batches of a trace, after one that warms the profiler up.
BATCHES = 10


class Profiler:
    """Writes a trace of the first batches to PROFILE_DIR.

    To be started and stopped in the thread that runs the model. An error of the profiler is logged,
    ends the profile, and does not fail a request.
    """

    def __init__(self, config: ModelConfig) -> None:
        folder = config.options.profile_dir or ""
        name = f"{config.instance}-{config.version}"  # instances of two versions have one name
        self._profile: profile | None = profile(
            schedule=schedule(wait=0, warmup=1, active=BATCHES, repeat=1),
            on_trace_ready=tensorboard_trace_handler(folder, name, use_gzip=True),
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Profile the first batches within the context."""
        self._call(profile.start)
        try:
            yield
        finally:
            self._call(profile.stop)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Enter a batch; its end may write the trace."""
        try:
            with record_function("batch"):
                yield
        finally:
            self._call(profile.step)

    def _call(self, change: Callable[[profile], None]) -> None:
        try:
            if self._profile is not None:
                change(self._profile)
        except Exception as error:  # such as a full disk, or a profiler of the model's own code
            self._profile = None
            log.warning("the profiler failed: %s.", summarize(error))
