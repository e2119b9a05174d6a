"""What needs a CUDA device: where things run, and that they come back right."""

from __future__ import annotations

import json
from pathlib import Path

import fake_triton
import models
import numpy as np
import pytest
import scenarios
import torch

from torch_py_backend.adapter import TritonPythonModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

_ON_GPU = [one for one in scenarios.NAMES + scenarios.FILES + scenarios.BATCHES if one.calls]


@pytest.mark.parametrize("scenario", _ON_GPU, ids=lambda one: one.name)
def test_scenario_on_the_gpu(scenario: scenarios.Scenario, tmp_path: Path, process: None) -> None:
    """What the table says happens, with KIND_GPU."""
    arguments = fake_triton.arguments(scenario.lay_out(tmp_path))
    model = TritonPythonModel()
    model.initialize(arguments | {"model_instance_kind": "GPU"})
    document = json.loads(arguments["model_config"])
    for call in scenario.calls:
        assert isinstance(call.expected, dict)
        (response,) = model.execute([fake_triton.request(call.inputs, document)])
        assert response.error() is None, response.error().message()
        for tensor in response.output_tensors():
            expected = call.expected.get(tensor.name())
            if expected is not None:
                came = tensor.as_numpy().reshape(expected.shape)
                np.testing.assert_allclose(came, expected, rtol=1e-3, atol=1e-4)


def test_runs_on_its_device_and_stream(tmp_path: Path, process: None) -> None:
    """The model's inputs are on the GPU, and work goes to a stream of the instance's own."""
    scenario = scenarios.Scenario(
        "where",
        scenarios.text(models.source(Where)),
        scenarios.config({"x": [4]}, {"y": [2]}),
    )
    model = TritonPythonModel()
    arguments = fake_triton.arguments(scenario.lay_out(tmp_path))
    model.initialize(arguments | {"model_instance_kind": "GPU"})
    document = json.loads(arguments["model_config"])
    (response,) = model.execute([fake_triton.request({"x": scenarios.floats(1, 4)}, document)])
    (tensor,) = response.output_tensors()
    assert tensor.as_numpy().tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_graphs_give_what_the_model_gives(tmp_path: Path, process: None, rows: int) -> None:
    """A replayed graph answers each batch with its own values, also one that fills a bucket."""
    scenario = scenarios.Scenario(
        "captured",
        scenarios.both(
            scenarios.python(models.Affine), scenarios.safe(scenarios.affine().state_dict())
        ),
        scenarios.config({"x": [4]}, {"y": [3]}, parameters={"OPTIMIZE": "cuda_graphs"}),
    )
    model = TritonPythonModel()
    arguments = fake_triton.arguments(scenario.lay_out(tmp_path))
    model.initialize(arguments | {"model_instance_kind": "GPU"})
    document = json.loads(arguments["model_config"])
    for seed in range(3):
        x = scenarios.floats(rows, 4, seed=seed)
        (response,) = model.execute([fake_triton.request({"x": x}, document)])
        assert response.error() is None, response.error().message()
        (tensor,) = response.output_tensors()
        expected = scenarios.eager(scenarios.affine(), x=x)
        np.testing.assert_allclose(tensor.as_numpy(), expected, rtol=1e-3, atol=1e-4)


class Where(torch.nn.Module):
    """1, 1 when its input is on the GPU and the stream is not the default one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = torch.cuda.current_stream() != torch.cuda.default_stream()
        return torch.tensor([[float(x.is_cuda), float(own)]], device=x.device)


def test_a_device_that_is_missing(tmp_path: Path, process: None) -> None:
    """A GPU that this machine lacks is refused with what it has."""
    arguments = fake_triton.arguments(scenarios.TABLE[0].lay_out(tmp_path))
    with pytest.raises(fake_triton.TritonModelException, match="asks for GPU 99"):
        TritonPythonModel().initialize(
            arguments | {"model_instance_kind": "GPU", "model_instance_device_id": "99"}
        )
