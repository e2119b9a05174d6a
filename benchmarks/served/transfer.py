"""A Python-based backend model that reads inputs and writes new responses, without computing.

What it costs beyond the no-op floor is Triton's Python API. It is copied into a repository as
`model.py`; beside it lies the answer, which is true of the example request.
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
        """Read the answer."""
        self._output = json.loads(args["model_config"])["output"][0]["name"]
        self._answer = np.load(Path(__file__).with_name("answer.npy"))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """As many responses as there are requests."""
        for request in requests:
            for tensor in request.inputs():
                tensor.as_numpy()
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(self._output, self._answer)])
            for _ in requests
        ]
