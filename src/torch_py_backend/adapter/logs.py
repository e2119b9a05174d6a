"""Write Python's log records to the server's log."""

from __future__ import annotations

import logging
import sys

import triton_python_backend_utils as pb_utils

from torch_py_backend.adapter import orphans


class LogHandler(logging.Handler):
    """Passes records to Triton's logger, with the model's name before them.

    Attributes:
        warnings: the first line of each warning since the handler was installed; None: they are not
            collected.
    """

    def __init__(self, model: str) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(f"model '{model}': %(message)s"))
        self.warnings: list[str] | None = []

    def emit(self, record: logging.LogRecord) -> None:
        if self.warnings is not None and record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage().partition("\n")[0])
        logger = pb_utils.Logger
        # Triton's logger raises for text that is not UTF-8, as an exception's message may be.
        text = self.format(record).encode(errors="replace").decode()
        if orphans.is_orphaned():
            sys.stderr.write(f"{text}\n")
        elif record.levelno >= logging.ERROR:
            logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            logger.log_warn(text)
        else:
            logger.log_info(text)


def install(model: str) -> LogHandler:
    """Send this package's records to Triton's logger only."""
    package = logging.getLogger("torch_py_backend")
    handler = LogHandler(model)
    package.handlers = [handler]
    package.setLevel(logging.INFO)
    package.propagate = False
    return handler
