"""Our backend model with a clock around each step of a plain model's execute(), in the instance.

The file is copied into a repository as `model.py`. When the instance ends, it writes its times: by
the number of requests in a call, a list of calls, each the nanoseconds of its steps. Wall time: the
clock of a thread's CPU time is a system call, longer than some steps.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from torch_py_backend import adapter

# The readings of the clock in one call that takes the fast path.
_READINGS = 8


class TritonPythonModel(adapter.TritonPythonModel):
    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model with its steps on the clock.

        Raises:
            RuntimeError: the model is not plain.
        """
        # torch is imported only now, as our backend does.
        from torch_py_backend.adapter import fast_path  # noqa: PLC0415
        from torch_py_backend.engine.engine import Engine  # noqa: PLC0415

        parameters = json.loads(args["model_config"])["parameters"]
        self._file = Path(parameters["CLOCK_FILE"]["string_value"])
        self._readings: list[int] = []
        self._spent: dict[int, list[list[int]]] = defaultdict(list)
        plain_call, reader, writer = Engine.plain_call, fast_path.reader, fast_path.writer

        def clocked_call(loaded: Engine) -> Any:
            plain = plain_call(loaded)
            if plain is None:
                raise RuntimeError("the model does not take the fast path")
            return plain._replace(forward=self._clocked(plain.forward))

        with (
            mock.patch.object(Engine, "plain_call", clocked_call),
            mock.patch.object(fast_path, "reader", lambda *words: self._clocked(reader(*words))),
            mock.patch.object(fast_path, "writer", lambda *words: self._clocked(writer(*words))),
        ):
            super().initialize(args)

    def _clocked(self, step: Callable[..., Any]) -> Callable[..., Any]:
        readings, clock = self._readings, time.perf_counter_ns

        @functools.wraps(step)
        def clocked(*args: Any) -> Any:
            readings.append(clock())
            result = step(*args)
            readings.append(clock())
            return result

        return clocked

    def execute(self, requests: Sequence[Any]) -> Any:
        """Return one response for each request, on the clock."""
        readings = self._readings
        readings[:] = [time.perf_counter_ns()]
        responses = super().execute(requests)
        readings.append(time.perf_counter_ns())
        if len(readings) == _READINGS:
            steps = [last - first for first, last in itertools.pairwise(readings)]
            self._spent[len(requests)].append(steps)
        return responses

    def finalize(self) -> None:
        """Write the times, and release the model."""
        super().finalize()
        self._file.write_text(json.dumps(self._spent))
