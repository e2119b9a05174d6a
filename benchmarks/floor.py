"""The no-op floor: a Python-based backend model that computes nothing.

What it costs is what Triton and its Python stub cost, which no backend written in Python can go
below: its `execute` returns one ready-made response for each request. It is copied into a
repository as `model.py`; beside it lies the answer, which is true of the example request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        """Make the response that every request gets."""
        output = json.loads(args["model_config"])["output"][0]["name"]
        answer = np.load(Path(__file__).with_name("answer.npy"))
        self._response = pb_utils.InferenceResponse([pb_utils.Tensor(output, answer)])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """The response, as often as there are requests."""
        return [self._response] * len(requests)
