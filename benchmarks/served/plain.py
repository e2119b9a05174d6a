"""A Python-based backend model by hand: the shortest that batches, for one model alone.

No config is read, nothing is checked, no request is refused, nothing is served that this file does
not name. It is copied into a repository as `model.py`, the network as `network.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import triton_python_backend_utils as pb_utils

_FOLDER = Path(__file__).parent


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        """Build the network, fill in its weights, call it once."""
        torch.set_num_threads(1)
        config = json.loads(args["model_config"])
        sys.path.insert(0, str(_FOLDER))
        import network  # noqa: PLC0415  beside this file

        named = config["parameters"]["MODEL_CLASS"]["string_value"]
        self._module = getattr(network, named)().eval()
        weights = _FOLDER / "model.safetensors"
        if weights.exists():
            safetensors.torch.load_model(self._module, str(weights))
        on_gpu = args["model_instance_kind"] == "GPU"
        self._device = f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu"
        self._module.to(self._device)
        self._inputs = [entry["name"] for entry in config["input"]]
        self._output = config["output"][0]["name"]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request, all of one row."""
        with torch.inference_mode():
            columns = [
                torch.cat(
                    [
                        torch.from_numpy(
                            pb_utils.get_input_tensor_by_name(request, name).as_numpy()
                        )
                        for request in requests
                    ]
                ).to(self._device)
                for name in self._inputs
            ]
            rows = self._module(*columns).cpu().split(1)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(self._output, row.numpy())]) for row in rows
        ]
