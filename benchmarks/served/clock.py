"""A backend model with clocks around execute() and forward(), in the instance.

Both clocks count CPU time of the thread. The file is copied into a repository as `model.py`, the
network as `network.py`, the backend model of the comparison as `base.py`. When the instance ends,
it writes its times.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import base
import network


class TritonPythonModel(base.TritonPythonModel):  # type: ignore[misc]  # any of three
    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model with forward() of its class on the clock."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._file = Path(parameters["CLOCK_FILE"]["string_value"])
        definition = getattr(network, parameters["CLOCKED_CLASS"]["string_value"])
        forward = definition.forward

        @functools.wraps(forward)  # forward's signature is what inputs are bound to
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time_ns()
            result = forward(*args, **kwargs)
            self._forward = time.thread_time_ns() - start
            return result

        definition.forward = timed
        self._forward = 0
        super().initialize(args)
        # By the number of requests: the nanoseconds of execute() and forward() in each call.
        self._spent: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return one response for each request, on the clock."""
        start = time.thread_time_ns()
        responses: list[Any] = super().execute(requests)
        self._spent[len(requests)].append((time.thread_time_ns() - start, self._forward))
        return responses

    def finalize(self) -> None:
        """Write the times, and release the model."""
        # A model written by hand has nothing to release.
        getattr(super(), "finalize", lambda: None)()
        self._file.write_text(json.dumps(self._spent))
