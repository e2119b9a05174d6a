"""What reaches the server: log records; and whether there is a server.

An instance whose tritonserver was killed ends by itself: a thread looks each second. A message to a
server that has ended, be it a metric, a log or the deletion of a request, would hold the GIL, or a
mutex that the stub needs to end, for ever. The kernel's signal at the death of a parent is sent too
early: when the thread that has loaded the model ends.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable

import triton_python_backend_utils as pb_utils

from torch_py_backend.errors import BackendError, join_names

log = logging.getLogger(__name__)

_SERVER = os.getppid()
# A longer text, such as a client's, is cut: Triton passes log messages in shared memory.
_MOST_CHARACTERS = 1 << 17


def end_if_orphaned() -> None:
    """End this process at once if the server has ended. Not for code that forked processes run."""
    if os.getppid() != _SERVER:
        os._exit(os.EX_UNAVAILABLE)


class LogHandler(logging.Handler):
    """Passes records to Triton's logger.

    Attributes:
        warnings: the first line of each warning; None: they are not collected.
    """

    warnings: list[str] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.warnings is not None and record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage().partition("\n")[0])
        # Triton's logger raises for text that is not UTF-8, as an exception's message may be.
        text = self.format(record)[:_MOST_CHARACTERS].encode(errors="replace").decode()
        logger = pb_utils.Logger
        if os.getppid() != _SERVER:  # or the model has forked this process
            sys.stderr.write(f"{text}\n")
        else:
            levels = {logging.ERROR: logger.log_error, logging.WARNING: logger.log_warn}
            levels.get(record.levelno, logger.log_info)(text)


def install(model: str) -> LogHandler:
    """Send this package's records to Triton's logger only, with the model's name before them."""
    package = logging.getLogger("torch_py_backend")
    handler = LogHandler()
    handler.setFormatter(logging.Formatter(f"model '{model.replace('%', '%%')}': %(message)s"))
    handler.warnings = []
    package.handlers = [handler]
    package.setLevel(logging.INFO)
    package.propagate = False
    return handler


def report(failed: Iterable[tuple[BackendError, str]]) -> None:
    """Log errors of requests with their IDs, equal ones once, unless the clients caused them."""
    names: dict[tuple[str, str], list[str]] = {}
    for error, name in failed:
        if error.reported:
            names.setdefault((str(error), error.traceback), []).append(name)
    for (sentence, text), requests in names.items():
        who = join_names(dict.fromkeys(requests))
        log.error("%s (requests %s)%s", sentence, who, f"\n{text}" if text else "")
