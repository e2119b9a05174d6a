"""What needs a CUDA device: where things run, and that they come back right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


# --- faults, each in a process of its own ------------------------------------------------------

_FAULTS = """
import json, sys
sys.path[:0] = {path!r}
import fake_triton
sys.modules["triton_python_backend_utils"] = fake_triton
import numpy as np
from torch_py_backend.adapter import TritonPythonModel
model = TritonPythonModel()
model.initialize(json.loads({arguments!r}))
for values in {batches!r}:
    requests = [
        fake_triton.InferenceRequest(
            [fake_triton.Tensor("x", np.full((1, 4), value, dtype=np.float32))]
        )
        for value in values
    ]
    answers = []
    for response in model.execute(requests):
        error = response.error()
        answers.append(
            error.message() if error else float(response.output_tensors()[0].as_numpy()[0, 0])
        )
    print(json.dumps([answers, model.is_ready()]))
"""


def _answers(
    folder: Path, definition: Any, batches: list[list[float]], **parameters: str
) -> list[tuple[list[Any], bool]]:
    """What an instance on the GPU answers to batches, and whether it is ready after each."""
    scenario = scenarios.Scenario(
        "faulty",
        scenarios.text(models.source(definition)),
        scenarios.config({"x": [4]}, {"y": [4]}, max_batch_size=64, parameters=parameters),
    )
    arguments = fake_triton.arguments(scenario.lay_out(folder)) | {"model_instance_kind": "GPU"}
    code = _FAULTS.format(path=sys.path, arguments=json.dumps(arguments), batches=batches)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == len(batches), done.stderr
    return [(answers, ready) for answers, ready in lines]


class Asserts(torch.nn.Module):
    """An index beyond the end is a device-side assertion."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.arange(8, device=x.device, dtype=x.dtype)
        return table[x.long()] * 2


class Strays(torch.nn.Module):
    """Reads memory that is nobody's when a value is above 7."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x > 7).any()):
            nobodys: dict[str, Any] = {
                "nbytes": 1 << 20,
                "data_ptr": 1 << 16,
                "size": tuple(x.shape),
                "stride": (x.shape[1], 1),
                "dtype": x.dtype,
                "device": x.device,
                "storage_offset": 0,
            }
            storage = torch._C._construct_storage_from_data_pointer(
                nobodys["data_ptr"], x.device, nobodys["nbytes"]
            )
            stray: Any = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(nobodys, storage)
            x = x + stray
        return x * 2


@pytest.mark.parametrize("definition", [Asserts, Strays])
def test_a_broken_device_is_one_instances(definition: Any, tmp_path: Path, process: None) -> None:
    """An instance whose context is spoilt computes nothing any more; another one serves on."""
    other = TritonPythonModel()
    scenario = scenarios.Scenario(
        "well", scenarios.python(models.Negate), scenarios.config({"x": [4]}, {"y": [4]})
    )
    arguments = fake_triton.arguments(scenario.lay_out(tmp_path))
    other.initialize(arguments | {"model_instance_kind": "GPU"})
    document = json.loads(arguments["model_config"])

    good, bad, after = _answers(tmp_path, definition, [[1.0, 2.0], [3.0, 99.0], [1.0]])
    (response,) = other.execute([fake_triton.request({"x": scenarios.floats(1, 4)}, document)])

    assert good == ([2.0, 4.0], True)
    for answers, ready in (bad, after):
        assert not ready
        assert all("met a fatal error" in answer for answer in answers)
    assert response.error() is None


class Hungry(torch.nn.Module):
    """Takes a quarter of the GPU's memory for each row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.cuda.get_device_properties(x.device).total_memory
        activation = torch.ones(x.shape[0], total // 16, device=x.device)
        return x * 2 * activation[:, :1]


def test_batches_that_do_not_fit_on_the_gpu(tmp_path: Path) -> None:
    """A batch that needs more than there is, is run in pieces, this time and the next."""
    batch = [float(value) for value in range(8)]
    for answers, ready in _answers(tmp_path, Hungry, [batch, batch], WARMUP="false"):
        assert ready
        assert answers == [2 * value for value in batch]


def test_an_instances_share_of_memory(tmp_path: Path) -> None:
    """With CUDA_MEMORY_FRACTION a single row may be too much: 503, and the instance serves on."""
    ((answers, ready),) = _answers(
        tmp_path, Hungry, [[1.0]], WARMUP="false", CUDA_MEMORY_FRACTION="0.1"
    )
    assert ready
    assert "does not fit in memory" in answers[0]


def test_a_device_that_is_missing(tmp_path: Path, process: None) -> None:
    """A GPU that this machine lacks is refused with what it has."""
    arguments = fake_triton.arguments(scenarios.TABLE[0].lay_out(tmp_path))
    with pytest.raises(fake_triton.TritonModelException, match="asks for GPU 99"):
        TritonPythonModel().initialize(
            arguments | {"model_instance_kind": "GPU", "model_instance_device_id": "99"}
        )
