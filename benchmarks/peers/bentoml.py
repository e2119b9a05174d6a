"""BentoML: a batchable API of one service with one worker.

https://docs.bentoml.com/en/latest/get-started/adaptive-batching.html

A batchable API takes one array; BentoML carries arrays as JSON. All inputs of a request are one row
of it. `max_latency_ms` is no waiting time, but what a request may take before it is refused.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import bentoml
import numpy as np
import numpy.typing as npt
import torch
from bentoml.validators import DType

from benchmarks.models import MAX_BATCH_SIZE, MODELS
from benchmarks.peers import wire

# `bentoml serve` imports this module by name.
VARIABLE = "BENCHMARK_MODEL"
_MODEL = MODELS[os.environ.get(VARIABLE, "add")]
_DTYPE = wire.NUMPY_TYPES[_MODEL.inputs[0].dtype].name
_MAX_LATENCY_MS = 60_000


@bentoml.service(workers=1, logging={"access": {"enabled": False}})
class Service:
    def __init__(self) -> None:
        self._module = _MODEL.build()

    @bentoml.api(batchable=True, max_batch_size=MAX_BATCH_SIZE, max_latency_ms=_MAX_LATENCY_MS)
    def predict(  # BentoML knows an array without its type arguments only
        self,
        rows: Annotated[np.ndarray, DType(_DTYPE)],  # type: ignore[type-arg]
    ) -> np.ndarray:  # type: ignore[type-arg]
        columns, start = [], 0
        for spec in _MODEL.inputs:
            end = start + math.prod(spec.dims)
            columns.append(torch.from_numpy(rows[:, start:end].reshape(-1, *spec.dims)))
            start = end
        with torch.inference_mode():
            answer: npt.NDArray[Any] = self._module(*columns).numpy()
        return answer


def main() -> None:
    arguments = wire.arguments()
    os.environ[VARIABLE] = arguments.model
    os.environ["BENTOML_DO_NOT_TRACK"] = "true"
    command = str(Path(sys.executable).with_name("bentoml"))
    served = ["serve", f"{__spec__.name}:Service", "--host", "127.0.0.1"]
    os.execv(command, [command, *served, "--port", str(arguments.port)])


if __name__ == "__main__":
    main()
