"""What needs a CUDA device: where things run, and that they come back right.

With GPU_DEVICE=cpu, those without the mark `_CUDA` run on the CPU, which proves that they run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_triton
import instances
import models
import numpy as np
import pytest
import scenarios
import stateful
import torch
from children import Child, Start, starting, until
from scenarios import Refused, Scenario
from torch import Tensor, nn

from torch_py_backend.adapter import messages
from torch_py_backend.config import pbtxt

_ON_CPU = os.environ.get("GPU_DEVICE") == "cpu"
_KIND = "CPU" if _ON_CPU else "GPU"
_NO_GPU = not torch.cuda.is_available()
_CUDA = pytest.mark.skipif(_NO_GPU, reason="no CUDA device on this machine")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_NO_GPU and not _ON_CPU, reason="no CUDA device on this machine"),
]


class Served(instances.Served):
    """A model in this process, with KIND_GPU unless its config has KIND_MODEL."""

    def __init__(self, folder: Path, scenario: Scenario, kind: str = _KIND) -> None:
        super().__init__(folder, scenario, kind)

    def ask(self, *values: Any) -> list[Tensor]:
        """Return the only output for each value of x, which are in one batch."""
        tensors = [fake_triton.Tensor.sent("x", value) for value in values]
        responses = self.model.execute([fake_triton.InferenceRequest([one]) for one in tensors])
        outputs = []
        for response in responses:
            (output,) = _outputs(response).values()
            outputs.append(output)
        return outputs


def _outputs(response: Any) -> dict[str, Tensor]:
    assert response.error() is None, response.error().message()
    return {
        tensor.name(): torch.utils.dlpack.from_dlpack(tensor.to_dlpack())
        for tensor in response.output_tensors()
    }


def _net(code: str, y: int = 4, **parameters: str) -> Scenario:
    return Scenario(
        "net", scenarios.text(f"import torch\n\n\n{code}"), scenarios.x_to_y(y, **parameters)
    )


_TABLE = (
    *(one for one in scenarios.NAMES + scenarios.FILES + scenarios.BATCHES if one.calls),
    *(one for one in scenarios.RAGGED if one.name != "batch_output"),
    *(one for one in scenarios.SEQUENCES if "strings" not in one.name),
)


@pytest.mark.parametrize("scenario", _TABLE, ids=lambda one: one.name)
def test_the_table_holds_on_the_gpu(scenario: Scenario, tmp_path: Path, process: None) -> None:
    served = Served(tmp_path, scenario)
    for call in scenario.calls:
        (response,) = served.model.execute([served.request(call.inputs, turn=call.turn)])
        if isinstance(call.expected, Refused):
            assert response.error() is not None
            continue
        outputs = _outputs(response)
        for name, value in call.expected.items():
            bf16 = isinstance(value, Tensor)
            expected = value if bf16 else torch.from_numpy(np.ascontiguousarray(value))
            actual = outputs[name].cpu().reshape(expected.shape)
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@_CUDA
def test_states_of_sequences_stay_on_the_gpu() -> None:
    settings = stateful.config(stateful.make_state())
    served = stateful.Served(settings, models.Accumulate(), "cuda")
    for flags in ("s", "", ""):
        served.send(stateful.step(1, 1, flags), stateful.step(2, 1, flags))
    kept = [states["total"] for states, _ in served.states._live.values()]
    assert all(isinstance(value, Tensor) and value.is_cuda for value in kept)


@_CUDA
@pytest.mark.slow
def test_a_package_for_cuda_is_completed(tmp_path: Path, process: None) -> None:
    """Its shapes and rows are found out on the GPU: a package runs on the device of its build only.

    So does `init`, which places its instances there.

    https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html
    """
    affine = scenarios.affine().eval()

    def compiled(folder: Path) -> None:
        shapes = ({0: torch.export.Dim("rows", min=1, max=20)},)
        example = (torch.rand(2, 4, device="cuda"),)
        program = torch.export.export(affine.cuda(), example, dynamic_shapes=shapes)
        path = folder / "model.pt2"
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))

    example = scenarios.safe({"x": torch.rand(2, 4)}, "example_inputs.safetensors")
    config = 'backend: "pytorch_py"\ninstance_group [{ kind: KIND_GPU count: 1 }]\n'
    served = Served(tmp_path, Scenario("net", scenarios.both(compiled, example), config))
    assert served.document["max_batch_size"] == 20
    (name,) = [one["name"] for one in served.document["input"]]
    for count in (1, 7, 20):
        x = scenarios.floats(count, 4)
        (response,) = served.model.execute([served.request({name: x})])
        (output,) = _outputs(response).values()
        expected = torch.from_numpy(scenarios.eager(affine.cpu(), x=x))
        torch.testing.assert_close(output.cpu(), expected, rtol=1e-3, atol=1e-4)
    pytest.importorskip("typer", reason="typer is not installed (make gpu-site)")
    command = [sys.executable, "-m", "torch_py_backend", "init", "net/1/model.pt2", "--name=other"]
    command += ["--input=INPUT__0:FP32:4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    groups = pbtxt.read(tmp_path / "other")["instance_group"]
    assert [group["kind"] for group in groups] == ["KIND_GPU"]


_DOUBLE = "def f(x):\n    return 2 * x\n"


@_CUDA
@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_clients_tensors_on_the_gpu(kind: str, tmp_path: Path, process: None) -> None:
    """With FORCE_CPU_ONLY_INPUT_TENSORS "no" Triton leaves them there, whatever the instance is.

    `GetInputTensor` does not look at the instance's kind:
    https://github.com/triton-inference-server/python_backend/blob/main/src/python_be.cc
    An instance on the GPU leaves outputs where the inputs are.
    """
    served = Served(tmp_path, _net(_DOUBLE, FORCE_CPU_ONLY_INPUT_TENSORS="no"), kind)
    x = torch.from_numpy(scenarios.floats(2, 4))
    for value in (x.cuda(), x):
        (output,) = served.ask(value)
        torch.testing.assert_close(output.cpu(), 2 * x)
        assert output.is_cuda == (value.is_cuda and kind == "GPU")
    for output in served.ask(x.cuda(), x):
        torch.testing.assert_close(output.cpu(), 2 * x)


_GRAPHS = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "cudagraphs"}'}


@pytest.mark.parametrize(
    "parameters",
    [
        pytest.param({}, id="plain"),
        pytest.param({"OPTIMIZE": "fp16"}, id="fp16", marks=_CUDA),
        pytest.param(_GRAPHS, id="CUDA graphs", marks=_CUDA),
    ],
)
def test_an_answer_is_the_same_in_a_batch_and_not_changed_by_the_next_one(
    parameters: dict[str, str], tmp_path: Path, process: None
) -> None:
    served = Served(
        tmp_path, Scenario("net", scenarios.affine_files(), scenarios.x_to_y(3, **parameters))
    )
    batches = [
        [torch.from_numpy(scenarios.floats(rows, 4, seed=seed))] * (2 if rows < 5 else 1)
        for seed, rows in enumerate((1, 2, 3, 8, 4, 1))
    ]
    expected = [[served.ask(value)[0] for value in batch] for batch in batches]
    for _ in range(3):
        for batch, outputs in zip(batches, expected, strict=True):
            torch.testing.assert_close(served.ask(*batch), outputs, rtol=0, atol=1e-6)


_INSTANCE = """
import json, sys
import fake_triton
sys.modules["triton_python_backend_utils"] = fake_triton
import numpy as np
from torch_py_backend.adapter import TritonPythonModel
model = TritonPythonModel()
model.initialize(json.loads(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    requests = []
    for value in json.loads(line):
        x = np.full((1, int(sys.argv[2])), value, dtype=np.float32)
        requests.append(fake_triton.InferenceRequest([fake_triton.Tensor("x", x)]))
    answers = []
    for response in model.execute(requests):
        error = response.error()
        answers.append(
            error.message() if error else float(response.output_tensors()[0].as_numpy()[0, 0])
        )
    print(json.dumps([answers, model.is_ready()]), flush=True)  # the end may be an abort
model.finalize()
"""


def _start(start: Start, arguments: dict[str, str], width: int = 4, name: str = "net") -> Child:
    """Start an instance."""
    arguments = arguments | {"model_instance_kind": _KIND, "model_instance_name": name}
    return start(_INSTANCE, json.dumps(arguments), width)


def _answers(folder: Path, scenario: Scenario, *batches: list[float]) -> list[list[Any]]:
    """Return an instance's answers to each batch, and whether it is ready after it."""
    with starting(folder) as start:
        instance = _start(start, fake_triton.arguments(scenario.lay_out(folder)))
        assert instance.hear() == "ready"
        return [json.loads(instance.ask(json.dumps(batch))) for batch in batches]


def test_an_instance_of_its_own(tmp_path: Path) -> None:
    assert _answers(tmp_path, _net(_DOUBLE), [1.0, 2.0]) == [[[2.0, 4.0], True]]


# An index beyond the end is a device-side assertion.
_ASSERTS = """def f(x):
    table = torch.arange(8, device=x.device, dtype=x.dtype)
    return table[x.long()] * 2
"""
# Reads memory that is nobody's when a value is above 7.
_STRAYS = """def f(x):
    if bool((x > 7).any()):
        storage = torch._C._construct_storage_from_data_pointer(1 << 16, x.device, 1 << 20)
        fields = {"size": tuple(x.shape), "stride": (x.shape[1], 1), "dtype": x.dtype}
        fields |= {"device": x.device, "storage_offset": 0, "nbytes": 1 << 20, "data_ptr": 1 << 16}
        x = x + torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(fields, storage)
    return x * 2
"""
# Takes a quarter of the GPU's memory for each row.
_HUNGRY = """def f(x):
    total = torch.cuda.get_device_properties(x.device).total_memory
    return x * 2 * torch.ones(x.shape[0], total // 16, device=x.device)[:, :1]
"""


@_CUDA
@pytest.mark.parametrize("code", [_ASSERTS, _STRAYS], ids=["assertion", "stray access"])
def test_a_broken_device_is_one_instances(code: str, tmp_path: Path, process: None) -> None:
    """An instance whose context is spoilt computes nothing any more; another one serves on."""
    other = Served(tmp_path / "other", _net(_DOUBLE))
    good, bad, after = _answers(tmp_path, _net(code), [1.0, 2.0], [3.0, 99.0], [1.0])
    assert good == [[2.0, 4.0], True]
    for answers, ready in (bad, after):
        assert not ready
        assert all("met a fatal error" in answer for answer in answers)
    other.ask(torch.rand(1, 4))


@_CUDA
def test_batches_that_do_not_fit_on_the_gpu(tmp_path: Path) -> None:
    """They run in pieces; a row beyond CUDA_MEMORY_FRACTION gets 503; the instance serves on."""
    batch = [float(value) for value in range(8)]
    ((answers, ready),) = _answers(tmp_path / "whole", _net(_HUNGRY, WARMUP="false"), batch)
    assert ready
    assert answers == [2 * value for value in batch]
    part = _net(_HUNGRY, WARMUP="false", CUDA_MEMORY_FRACTION="0.1")
    ((answers, ready),) = _answers(tmp_path / "part", part, [1.0])
    assert ready
    assert "does not fit in memory" in answers[0]


class Wide(nn.Module):
    """256 MB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


_WIDTH = 4096
_WIDE_BYTES = 4 * _WIDTH * _WIDTH * 4


def _program(folder: Path) -> None:
    rows = {"x": {0: torch.export.Dim("rows", max=64)}}
    program = torch.export.export(Wide().eval(), (torch.ones(2, _WIDTH),), dynamic_shapes=rows)
    torch.export.save(program, folder / "model.pt2")


def _script(folder: Path) -> None:
    scenarios.script(Wide())(folder)


def _module(folder: Path) -> None:
    scenarios.both(scenarios.python(Wide), scenarios.safe(Wide().state_dict()))(folder)


def _sharing(
    start: Start, folder: Path, write: Callable[[Path], None], shared: str, names: str
) -> list[Child]:
    """Start instances of a model with the option ENABLE_WEIGHT_SHARING, one after another."""
    parameters = {"ENABLE_WEIGHT_SHARING": shared}
    config = scenarios.config({"x": [_WIDTH]}, {"y": [_WIDTH]}, parameters=parameters)
    arguments = fake_triton.arguments(Scenario(f"net_{shared}", write, config).lay_out(folder))
    instances = []
    for name in names:
        instances.append(_start(start, arguments, _WIDTH, name))
        assert instances[-1].hear() == "ready"
    return instances


def _used(start: Start, folder: Path, write: Callable[[Path], None], shared: str) -> int:
    """Return what four instances use of the GPU; all answer the same, and give all back."""
    before, _ = torch.cuda.mem_get_info()
    instances = _sharing(start, folder, write, shared, "abcd")
    assert len({one.ask("[1.0]") for one in instances}) == 1
    used = before - torch.cuda.mem_get_info()[0]
    assert [one.end() for one in instances] == [0] * 4
    # The driver may free memory after the end of a process.
    until(lambda: torch.cuda.mem_get_info()[0] >= before - _WIDE_BYTES // 8)
    return used


@_CUDA
@pytest.mark.slow
@pytest.mark.parametrize("write", [_module, _script, _program])
def test_weights_of_four_instances_are_on_the_gpu_once(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    with starting(tmp_path) as start:
        private = _used(start, tmp_path, write, "false")
        shared = _used(start, tmp_path, write, "true")
    assert private - shared >= 2.9 * _WIDE_BYTES


@_CUDA
@pytest.mark.slow
def test_without_the_owner_of_their_weights_the_others_refuse_all_requests(tmp_path: Path) -> None:
    with starting(tmp_path) as start:
        owner, *others = _sharing(start, tmp_path, _module, "true", "abc")
        ((expected,), _) = json.loads(owner.ask("[1.0]"))
        owner.kill()
        for one in others:
            answers = [json.loads(one.ask("[1.0]"))[0][0] for _ in range(20)]
            assert {answer for answer in answers if isinstance(answer, float)} <= {expected}
            assert "owned the weights has ended" in str(answers[-1])


@_CUDA
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4, 5), (2, 3, 4, 0)])
def test_empty_outputs_that_stay_on_the_gpu(shape: tuple[int, ...]) -> None:
    """Triton's utilities compare strides even of a tensor without values.

    torch counts a size of 0 as 1 in strides (c10::TensorImpl), Triton as 0.
    """
    written = messages.write_tensor("y", torch.empty(shape, device="cuda"))
    assert tuple(torch.utils.dlpack.from_dlpack(written.to_dlpack()).shape) == shape
