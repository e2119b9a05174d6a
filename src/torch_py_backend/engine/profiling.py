"""Profiles the first batches of an instance that serves (option PROFILE_DIR)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch.profiler import profile, record_function, schedule, tensorboard_trace_handler

from torch_py_backend import files
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import ConfigError, summarize

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

# The batches of a trace, after one that warms the profiler up.
BATCHES = 10


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
            f"PROFILE_DIR is '{folder}', which cannot be written to: {error.strerror or error}",
            expected="an existing folder that the server's user may write to",
        ) from None


class Profiler:
    """Writes a trace of the first batches to PROFILE_DIR.

    A context manager that is entered in the thread that runs the model. An error of the profiler is
    logged, ends the profile, and does not fail a request.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._left = 0
        folder = config.options.profile_dir or ""
        name = f"{config.instance}-{config.version}"  # instances of two versions have one name
        self._profile = profile(
            schedule=schedule(wait=0, warmup=1, active=BATCHES, repeat=1),
            on_trace_ready=tensorboard_trace_handler(folder, name, use_gzip=True),
        )

    def __enter__(self) -> Self:
        self._left = 1 + BATCHES
        self._guarded(self._profile.start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._left:
            self._guarded(self._profile.stop)
            self._left = 0

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Enter a batch; its end may write the trace."""
        if not self._left:
            yield
            return
        try:
            with record_function("batch"):
                yield
        finally:
            self._left = max(self._left - 1, 0)
            self._guarded(self._profile.step if self._left else self._profile.stop)

    def _guarded(self, change: Callable[[], None]) -> None:
        try:
            change()
        except Exception as error:  # such as a full disk, or a profiler of the model's own code
            self._left = 0
            log.warning("the profiler failed: %s.", summarize(error))
