"""A model for Triton's Python backend, written by hand: what the demo compares with.

The demo copies it into a model folder as model.py, and the file of the network as network.py.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import network
import safetensors.torch
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        torch.set_num_threads(1)
        config = json.loads(args["model_config"])
        self.input = config["input"][0]["name"]
        self.output = config["output"][0]["name"]
        network_class = getattr(network, config["parameters"]["MODEL_CLASS"]["string_value"])
        self.model = network_class().eval()
        weights = Path(__file__).with_name("model.safetensors")
        self.model.load_state_dict(safetensors.torch.load_file(weights))

    @torch.inference_mode()
    def execute(self, requests: Sequence[Any]) -> list[Any]:
        inputs = [pb_utils.get_input_tensor_by_name(request, self.input) for request in requests]
        parts = [torch.from_numpy(tensor.as_numpy()) for tensor in inputs]
        results = self.model(torch.cat(parts)).split([len(part) for part in parts])
        tensors = [pb_utils.Tensor(self.output, result.numpy()) for result in results]
        return [pb_utils.InferenceResponse([tensor]) for tensor in tensors]
