"""Write Python's log records to the server's log."""

from __future__ import annotations

import logging

import triton_python_backend_utils as pb_utils


class LogHandler(logging.Handler):
    """Passes records to Triton's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = pb_utils.Logger
        # Triton's logger raises for text that is not UTF-8, as an exception's message may be.
        text = self.format(record).encode(errors="replace").decode()
        if record.levelno >= logging.ERROR:
            logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            logger.log_warn(text)
        else:
            logger.log_info(text)


def install() -> None:
    """Send this package's records to Triton's logger only."""
    package = logging.getLogger("torch_py_backend")
    package.handlers = [LogHandler()]
    package.setLevel(logging.INFO)
    package.propagate = False
