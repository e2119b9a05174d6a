"""Our backend with clocks around `execute`, the engine's `run`, and `forward`, in the instance.

A Python-based backend model whose TritonPythonModel is ours. The clocks tick in the same process
at the same calls, so what the machine does at that moment is in all of them. It is copied into a
repository as `model.py`, the network as `network.py`; when it ends, it writes what it counted.
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

from torch_py_backend import adapter

_FOLDER = Path(__file__).parent


class TritonPythonModel(adapter.TritonPythonModel):
    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model with its class' forward() on the clock."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._file = Path(parameters["CLOCK_FILE"]["string_value"])
        sys.path.insert(0, str(_FOLDER))
        import network  # noqa: PLC0415  beside this file; imports torch

        from torch_py_backend.engine.engine import Engine  # noqa: PLC0415

        named = parameters["MODEL_FACTORY"]["string_value"].partition(":")[2]
        chosen = getattr(network, named)
        chosen.forward = self._on_clock("forward", chosen.forward)
        # Of the class: who calls it may have taken it from the instance when that was made.
        Engine.run = self._on_clock("engine", Engine.run)  # type: ignore[method-assign]
        self._seconds = {"forward": 0.0, "engine": 0.0}
        super().initialize(args)
        # By the number of requests: calls, and the seconds of all of them on each clock.
        self._spent: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def _on_clock(self, name: str, function: Any) -> Any:
        @functools.wraps(function)  # forward's signature is what inputs are bound to
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self._seconds[name] += time.perf_counter() - start
            return result

        return timed

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request, on the clock."""
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        start = time.perf_counter()
        responses: list[Any] = super().execute(requests)
        self._seconds["execute"] = time.perf_counter() - start
        spent = self._spent[len(requests)]
        spent["calls"] += 1
        for name, seconds in self._seconds.items():
            spent[name] += seconds
        return responses

    def finalize(self) -> None:
        """Leave what was counted."""
        super().finalize()
        self._file.write_text(json.dumps(self._spent))
