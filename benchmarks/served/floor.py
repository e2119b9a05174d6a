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
        """Make a response for each place in a batch: one that is sent twice crashes Triton."""
        config = json.loads(args["model_config"])
        output = config["output"][0]["name"]
        answer = np.load(Path(__file__).with_name("answer.npy"))
        self._responses = [
            pb_utils.InferenceResponse([pb_utils.Tensor(output, answer.copy())])
            for _ in range(config["max_batch_size"])
        ]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """As many responses as there are requests."""
        return self._responses[: len(requests)]
