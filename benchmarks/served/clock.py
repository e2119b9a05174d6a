"""Our backend with a clock around `execute` and one around `forward`, in the instance itself.

A Python-based backend model whose TritonPythonModel is ours. Both clocks tick in the same process
at the same calls, so what the machine does at that moment is in both. It is copied into a
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

        named = parameters["MODEL_FACTORY"]["string_value"].partition(":")[2]
        chosen = getattr(network, named)
        chosen.forward = self._on_clock(chosen.forward)
        self._forward = 0.0
        super().initialize(args)
        # By the number of requests: calls, seconds in execute, seconds in forward.
        self._spent: dict[int, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])

    def _on_clock(self, forward: Any) -> Any:
        @functools.wraps(forward)  # its signature is what inputs are bound to
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = forward(*args, **kwargs)
            self._forward += time.perf_counter() - start
            return result

        return timed

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request, on the clock."""
        self._forward = 0.0
        start = time.perf_counter()
        responses = super().execute(requests)
        spent = self._spent[len(requests)]
        spent[0] += 1
        spent[1] += time.perf_counter() - start
        spent[2] += self._forward
        return responses

    def finalize(self) -> None:
        """Leave what was counted."""
        self._file.write_text(json.dumps(self._spent))
