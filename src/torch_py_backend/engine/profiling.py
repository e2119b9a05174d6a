"""Profiles the first batches of an instance that serves (option PROFILE_DIR)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias

from torch.profiler import profile, record_function, schedule, tensorboard_trace_handler

from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import summarize

log = logging.getLogger(__name__)

# The batches of a trace, after one that warms the profiler up.
BATCHES = 10
# Returns the context of a batch, whose end may write the trace.
Batch: TypeAlias = "Callable[[], AbstractContextManager[None]]"


@contextlib.contextmanager
def running(config: ModelConfig) -> Iterator[Batch]:
    """Profile the first batches within the context, in the thread that runs the model.

    An error of the profiler is logged, ends the profile, and does not fail a request.
    """
    if config.options.profile_dir is None:
        yield contextlib.nullcontext
        return
    name = f"{config.instance}-{config.version}"  # instances of two versions have one name
    profiler = profile(
        schedule=schedule(wait=0, warmup=1, active=BATCHES, repeat=1),
        on_trace_ready=tensorboard_trace_handler(config.options.profile_dir, name, use_gzip=True),
    )

    failed = False

    def attempt(change: Callable[[], object]) -> None:
        nonlocal failed
        try:
            if not failed:
                change()
        except Exception as error:  # such as a full disk, or a profiler of the model's own code
            failed = True
            log.warning("the profiler failed: %s.", summarize(error))

    @contextlib.contextmanager
    def batch() -> Iterator[None]:
        try:
            with record_function("batch"):
                yield
        finally:
            attempt(profiler.step)

    attempt(profiler.start)
    try:
        yield batch
    finally:
        attempt(profiler.stop)
