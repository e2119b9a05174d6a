"""A backend model that measures each of its calls of execute(), in the instance.

The file is copied as `model.py` into a backend's folder, or into a version folder, beside `base.py`
with the backend model that is measured. When the instance ends, it writes a list of its calls to
the folder GAUGE_FOLDER: when the call ended, the number of requests, and

- the CPU time of the thread in nanoseconds; or, where GAUGE is `calls`,
- the files beside this one whose functions were called, one entry for each call of a function.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

_FOLDER = f"{Path(__file__).parent}{os.sep}"
# Before Python 3.12 they are functions.
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")
sys.path.insert(0, _FOLDER)

import base  # noqa: E402  beside this file


class TritonPythonModel(base.TritonPythonModel):  # type: ignore[misc]  # any backend model
    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model."""
        super().initialize(args)
        self._gauge_file = Path(os.environ["GAUGE_FOLDER"], f"{args['model_name']}.json")
        self._gauge = _called if os.environ.get("GAUGE") == "calls" else _timed
        self._gauge_calls: list[tuple[int, int, Any]] = []

    def execute(self, requests: Sequence[Any]) -> Any:
        """Return the responses of the measured model."""
        responses, figure = self._gauge(super().execute, requests)
        self._gauge_calls.append((time.monotonic_ns(), len(requests), figure))
        return responses

    def finalize(self) -> None:
        """Write the calls, and release the model."""
        # A model written by hand has nothing to release.
        getattr(super(), "finalize", lambda: None)()
        self._gauge_file.write_text(json.dumps(self._gauge_calls))


def _timed(execute: Any, requests: Sequence[Any]) -> tuple[Any, int]:
    start = time.thread_time_ns()
    responses = execute(requests)
    return responses, time.thread_time_ns() - start


def _called(execute: Any, requests: Sequence[Any]) -> tuple[Any, list[str]]:
    files: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and file.startswith(_FOLDER) and name not in _COMPREHENSIONS:
            files.append(file.removeprefix(_FOLDER))

    sys.setprofile(profile)
    try:
        return execute(requests), files
    finally:
        sys.setprofile(None)
