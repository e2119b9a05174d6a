"""What needs a CUDA device: where things run, and that they come back right.

`make gpu DEVICE=cpu` runs those without the mark `_CUDA` on the CPU, which proves that they run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fake_triton
import models
import numpy as np
import pytest
import safetensors.torch
import scenarios
import stateful
import torch
from children import Start, starting
from pipeline import test_ragged
from torch import Tensor

from torch_py_backend.adapter import TritonPythonModel, messages
from torch_py_backend.config import pbtxt
from torch_py_backend.loading.discovery import ArtifactType
from torch_py_backend.values import Item

_ON_CPU = os.environ.get("GPU_DEVICE") == "cpu"
_KIND = "CPU" if _ON_CPU else "GPU"
_NO_GPU = not torch.cuda.is_available()
_CUDA = pytest.mark.skipif(_NO_GPU, reason="no CUDA device on this machine")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_NO_GPU and not _ON_CPU, reason="no CUDA device on this machine"),
]

_ON_GPU = [one for one in scenarios.NAMES + scenarios.FILES + scenarios.BATCHES if one.calls]
_ON_GPU += [
    one for one in scenarios.RAGGED if all(isinstance(call.expected, dict) for call in one.calls)
]


def _serve(scenario: scenarios.Scenario, folder: Path) -> tuple[TritonPythonModel, dict[str, Any]]:
    """Return a scenario's model on the GPU, unless its config places it, and its config."""
    model = TritonPythonModel()
    arguments = fake_triton.arguments(scenario.lay_out(folder))
    if arguments["model_instance_kind"] == "CPU":
        arguments |= {"model_instance_kind": _KIND}
    arguments = fake_triton.completed(model, arguments)
    model.initialize(arguments)
    return model, json.loads(arguments["model_config"])


def _assert_answer(response: Any, call: scenarios.Call) -> None:
    """The response has the values of the table, or an error if that has one."""
    if isinstance(call.expected, scenarios.Refused):
        assert response.error() is not None
        return
    assert response.error() is None, response.error().message()
    for tensor in response.output_tensors():
        expected = call.expected.get(tensor.name())
        if expected is None:
            continue
        if isinstance(expected, torch.Tensor):  # BF16
            actual = torch.utils.dlpack.from_dlpack(tensor.to_dlpack()).cpu()
            torch.testing.assert_close(actual.reshape(expected.shape), expected)
        else:
            actual = tensor.as_numpy().reshape(expected.shape)
            np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scenario", _ON_GPU, ids=lambda one: one.name)
def test_scenario_on_the_gpu(scenario: scenarios.Scenario, tmp_path: Path, process: None) -> None:
    """What the table says happens, with KIND_GPU."""
    model, document = _serve(scenario, tmp_path)
    for call in scenario.calls:
        (response,) = model.execute([fake_triton.request(call.inputs, document)])
        _assert_answer(response, call)


@_CUDA
def test_batch_inputs_are_where_their_source_is() -> None:
    """What is made of the shapes of tensors on the GPU does not call the outputs to the host."""
    items: list[Item] = [{"x": torch.ones(1, size, device="cuda")} for size in (2, 3)]
    (count, x), _ = test_ragged.gathered(test_ragged.config(), items)
    assert isinstance(count, torch.Tensor)
    assert isinstance(x, torch.Tensor)
    assert count.is_cuda
    assert x.is_cuda
    assert count.tolist() == [2, 3]


_SEQUENCES = [one for one in scenarios.SEQUENCES if "strings" not in one.name]


@pytest.mark.parametrize("scenario", _SEQUENCES, ids=lambda one: one.name)
def test_sequences_on_the_gpu(scenario: scenarios.Scenario, tmp_path: Path, process: None) -> None:
    """States stay on the GPU from step to step, and nothing else differs."""
    model, document = _serve(scenario, tmp_path)
    for call in scenario.calls:
        turn = call.turn or fake_triton.Turn(0)
        (response,) = model.execute([fake_triton.request(call.inputs, document, "", turn)])
        _assert_answer(response, call)


@_CUDA
def test_states_are_on_the_gpu(tmp_path: Path) -> None:
    """What is kept of a sequence never leaves the device."""
    settings = stateful.config(stateful.make_state())
    served = stateful.Served(settings, models.Accumulate(), "cuda")
    for flags in ("s", "", ""):
        served.send(stateful.step(1, 1, flags), stateful.step(2, 1, flags))
    kept = [one.states["total"] for one in served.states._live.values()]
    assert all(isinstance(value, torch.Tensor) and value.is_cuda for value in kept)


@_CUDA
@pytest.mark.slow
def test_a_package_for_cuda_is_completed(tmp_path: Path, process: None) -> None:
    """Its shapes and rows are found out on the GPU: a package runs on the device of its build only.

    https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html
    """
    version = tmp_path / "net" / "1"
    version.mkdir(parents=True)
    module = models.Affine().eval().cuda()
    rows = torch.export.Dim("rows", min=1, max=20)
    example = torch.rand(2, 4)
    program = torch.export.export(module, (example.cuda(),), dynamic_shapes=({0: rows},))
    torch._inductor.aoti_compile_and_package(program, package_path=str(version / "model.pt2"))
    safetensors.torch.save_file({"x": example}, version / "example_inputs.safetensors")
    (tmp_path / "net" / "config.pbtxt").write_text(
        'backend: "pytorch_py"\ninstance_group [{ kind: KIND_GPU count: 1 }]\n'
    )
    model = TritonPythonModel()
    arguments = fake_triton.completed(model, fake_triton.arguments(tmp_path / "net"))
    document = json.loads(arguments["model_config"])
    assert document["max_batch_size"] == 20
    model.initialize(arguments | {"model_instance_kind": "GPU"})
    for count in (1, 7, 20):
        x = scenarios.floats(count, 4)
        (name,) = [one["name"] for one in document["input"]]
        (response,) = model.execute([fake_triton.request({name: x}, document)])
        assert response.error() is None, response.error().message()
        (tensor,) = response.output_tensors()
        with torch.inference_mode():
            expected = module(torch.from_numpy(x).cuda()).cpu().numpy()
        np.testing.assert_allclose(tensor.as_numpy(), expected, rtol=1e-3, atol=1e-4)


@_CUDA
@pytest.mark.slow
def test_init_of_a_package_for_cuda(tmp_path: Path) -> None:
    """`init` loads and runs the package on the GPU, and places its instances there."""
    pytest.importorskip("typer", reason="typer is not installed (make gpu-site)")
    module = models.Affine().eval().cuda()
    rows = torch.export.Dim("rows", min=1, max=8)
    example = (torch.rand(2, 4, device="cuda"),)
    program = torch.export.export(module, example, dynamic_shapes=({0: rows},))
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "net.pt2"))
    command = [sys.executable, "-m", "torch_py_backend", "init", "net.pt2"]
    command += ["--input=INPUT__0:FP32:4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = pbtxt.read(tmp_path / "net")
    assert [group["kind"] for group in document["instance_group"]] == ["KIND_GPU"]
    assert [entry["dims"] for entry in document["output"]] == [[3]]


@_CUDA
def test_inputs_on_the_gpu_for_a_model_on_the_cpu(tmp_path: Path, process: None) -> None:
    """With FORCE_CPU_ONLY_INPUT_TENSORS "no" Triton leaves them there, whatever the instance is.

    `GetInputTensor` does not look at the instance's kind:
    https://github.com/triton-inference-server/python_backend/blob/main/src/python_be.cc
    """
    scenario = scenarios.Scenario(
        "net",
        scenarios.text("def forward(x):\n    return 2 * x\n"),
        scenarios.x_to_y(FORCE_CPU_ONLY_INPUT_TENSORS="no"),
    )
    model = TritonPythonModel()
    model.initialize(fake_triton.arguments(scenario.lay_out(tmp_path)))
    x = torch.from_numpy(scenarios.floats(1, 4))
    responses = model.execute(
        [
            fake_triton.InferenceRequest([fake_triton.Tensor.sent("x", value)])
            for value in (x.cuda(), x)
        ]
    )
    for response in responses:
        assert response.error() is None, response.error().message()
        (tensor,) = response.output_tensors()
        np.testing.assert_array_equal(tensor.as_numpy(), 2 * x.numpy())


@_CUDA
def test_outputs_stay_where_the_inputs_are(tmp_path: Path, process: None) -> None:
    """Tensors that clients hold on the GPU are not copied to the host and back."""
    scenario = scenarios.Scenario(
        "net",
        scenarios.text("def forward(x):\n    return 2 * x\n"),
        scenarios.x_to_y(FORCE_CPU_ONLY_INPUT_TENSORS="no"),
    )
    model, _ = _serve(scenario, tmp_path)
    x = torch.from_numpy(scenarios.floats(2, 4))
    for value in (x.cuda(), x):
        (response,) = model.execute(
            [fake_triton.InferenceRequest([fake_triton.Tensor.sent("x", value)])]
        )
        assert response.error() is None, response.error().message()
        (tensor,) = response.output_tensors()
        assert tensor.is_cpu() != value.is_cuda
        torch.testing.assert_close(torch.utils.dlpack.from_dlpack(tensor.to_dlpack()).cpu(), 2 * x)


@_CUDA
def test_runs_on_its_device(tmp_path: Path, process: None) -> None:
    """The model's inputs are on the GPU."""
    scenario = scenarios.Scenario(
        "where",
        scenarios.text(models.source(Where)),
        scenarios.config({"x": [4]}, {"y": [1]}),
    )
    model = TritonPythonModel()
    arguments = fake_triton.arguments(scenario.lay_out(tmp_path))
    model.initialize(arguments | {"model_instance_kind": "GPU"})
    document = json.loads(arguments["model_config"])
    (response,) = model.execute([fake_triton.request({"x": scenarios.floats(1, 4)}, document)])
    (tensor,) = response.output_tensors()
    assert tensor.as_numpy().tolist() == [[1.0]]


_AFFINE = scenarios.both(
    scenarios.python(models.Affine), scenarios.safe(scenarios.affine().state_dict())
)
_ADD_SUB = {"INPUT0": [4], "INPUT1": [4]}, {"OUTPUT0": [4], "OUTPUT1": [4]}


@pytest.mark.parametrize(
    ("parameters", "files", "tensors"),
    [
        pytest.param({}, _AFFINE, ({"x": [4]}, {"y": [3]}), id="one input"),
        pytest.param({}, scenarios.python(models.AddSub), _ADD_SUB, id="two inputs"),
        pytest.param(
            {"OPTIMIZE": "fp16"}, _AFFINE, ({"x": [4]}, {"y": [3]}), id="fp16", marks=_CUDA
        ),
        pytest.param(
            {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "cudagraphs"}'},
            _AFFINE,
            ({"x": [4]}, {"y": [3]}),
            id="CUDA graphs",
            marks=_CUDA,
        ),
    ],
)
def test_alone_and_in_a_batch(
    parameters: dict[str, str],
    files: scenarios.Writer,
    tensors: tuple[dict[str, list[int]], dict[str, list[int]]],
    tmp_path: Path,
    process: None,
) -> None:
    """A request has the same answer in a batch; the next batch does not change a response."""
    inputs, outputs = tensors
    scenario = scenarios.Scenario(
        "plain",
        files,
        scenarios.config(inputs, outputs, parameters=parameters),
    )
    model, document = _serve(scenario, tmp_path)

    def request(rows: int, seed: int) -> Any:
        values = {
            name: scenarios.floats(rows, 4, seed=seed + 10 * place)
            for place, name in enumerate(inputs)
        }
        return fake_triton.request(values, document)

    batches = [
        [request(rows, seed)] * (2 if rows < 5 else 1)
        for seed, rows in enumerate((1, 2, 3, 8, 4, 1))
    ]
    expected = [[model.execute([one])[0] for one in batch] for batch in batches]
    for _ in range(3):
        for batch, responses in zip(batches, expected, strict=True):
            for response, other in zip(model.execute(batch), responses, strict=True):
                pairs = zip(response.output_tensors(), other.output_tensors(), strict=True)
                for tensor, wanted in pairs:
                    assert tensor.name() == wanted.name()
                    np.testing.assert_allclose(tensor.as_numpy(), wanted.as_numpy(), atol=1e-6)


class Where(torch.nn.Module):
    """1 when its input is on the GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_full((len(x), 1), float(x.is_cuda))


# --- faults, each in a process of its own ------------------------------------------------------

_FAULTS = """
import json, sys
sys.path[:0] = {path!r}
import fake_triton
sys.modules["triton_python_backend_utils"] = fake_triton
import numpy as np
from torch_py_backend.adapter import TritonPythonModel
from torch_py_backend.loading.discovery import ArtifactType
from torch_py_backend.pipeline.ragged import Ragged
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
    print(json.dumps([answers, model.is_ready()]), flush=True)  # the end may be an abort
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


@_CUDA
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


@_CUDA
def test_a_gpu_that_is_named_by_its_uuid(
    tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As parts of a GPU (MIG) are, which have no number in CUDA_VISIBLE_DEVICES."""
    gpu = torch.cuda.get_device_properties(0)
    kind = "MIG" if " MIG " in gpu.name else "GPU"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{kind}-{gpu.uuid}")
    assert _answers(tmp_path, OnTheGpu, [[1.0]]) == [([2.0], True)]


class OnTheGpu(torch.nn.Module):
    """Twice its input on a GPU; else the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + int(x.is_cuda))


class Hungry(torch.nn.Module):
    """Takes a quarter of the GPU's memory for each row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.cuda.get_device_properties(x.device).total_memory
        activation = torch.ones(x.shape[0], total // 16, device=x.device)
        return x * 2 * activation[:, :1]


@_CUDA
def test_batches_that_do_not_fit_on_the_gpu(tmp_path: Path) -> None:
    """A batch that needs more than there is, is run in pieces."""
    batch = [float(value) for value in range(8)]
    for answers, ready in _answers(tmp_path, Hungry, [batch], WARMUP="false"):
        assert ready
        assert answers == [2 * value for value in batch]


@_CUDA
def test_an_instances_share_of_memory(tmp_path: Path) -> None:
    """With CUDA_MEMORY_FRACTION a single row may be too much: 503, and the instance serves on."""
    ((answers, ready),) = _answers(
        tmp_path, Hungry, [[1.0]], WARMUP="false", CUDA_MEMORY_FRACTION="0.1"
    )
    assert ready
    assert "does not fit in memory" in answers[0]


# An instance on the first GPU: tells how much of it is used, answers to ones, or leaves.
_INSTANCE = """
import sys
from pathlib import Path
import build, numpy, torch
from torch_py_backend.engine import load
from torch_py_backend.engine import warmup
from torch_py_backend.config.threads import Threads

config = build.config(
    Path(sys.argv[1]),
    instance=sys.argv[2],
    kind="GPU",
    enable_weight_sharing=sys.argv[3] == "shared",
    inputs=(build.spec("x", dims=(4096,)),),
    outputs=(build.spec("y", dims=(4096,)),),
)
made = load.build(config, Threads(1, 1))
warmup.run(made)
print("ready", flush=True)
with torch.inference_mode():
    for line in sys.stdin:
        if line == "used\\n":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            print(total - free, flush=True)
        elif line == "leave\\n":
            made.close()
            print("left", flush=True)
        else:
            (outcome,) = made.run([{"x": numpy.ones((1, 4096), numpy.float32)}])
            told = outcome["y"].sum() if isinstance(outcome, dict) else outcome.code
            print(told, flush=True)
"""


class Wide(torch.nn.Module):
    """256 MB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(4096, 4096, bias=False) for _ in range(4))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x)
        return made


_WIDE_BYTES = 4 * 4096 * 4096 * 4
_DRIVER_BYTES = _WIDE_BYTES // 8  # what it may keep for itself


def _wide(kind: ArtifactType, folder: Path) -> None:
    (folder / "1").mkdir()
    wide = Wide().eval()
    if kind is ArtifactType.MODULE:
        scenarios.python(Wide)(folder / "1")
        scenarios.safe(wide.state_dict())(folder / "1")
    elif kind is ArtifactType.TORCHSCRIPT:
        scenarios.script(wide)(folder / "1")
    else:
        rows = {"x": {0: torch.export.Dim("rows", max=64)}}
        program = torch.export.export(wide, (torch.ones(2, 4096),), dynamic_shapes=rows)
        torch.export.save(program, folder / "1" / "model.pt2")


def _used(start: Start, folder: Path, how: str) -> int:
    """What four instances use of the GPU; all answer the same, and give all back."""
    before = torch.cuda.mem_get_info()
    instances = [start(_INSTANCE, folder, name, how) for name in "abcd"]
    assert [one.hear() for one in instances] == ["ready"] * 4
    assert len({one.ask("answer") for one in instances}) == 1
    used = int(instances[0].ask("used")) - (before[1] - before[0])
    for one in instances:
        assert one.ask("leave") == "left"
        assert one.end() == 0
    until = time.monotonic() + 10  # the driver may free memory after the end of a process
    while torch.cuda.mem_get_info()[0] < before[0] - _DRIVER_BYTES and time.monotonic() < until:
        time.sleep(0.1)
    assert torch.cuda.mem_get_info()[0] >= before[0] - _DRIVER_BYTES
    return used


@_CUDA
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [ArtifactType.MODULE, ArtifactType.TORCHSCRIPT, ArtifactType.EXPORTED]
)
def test_weights_are_on_the_gpu_once(kind: ArtifactType, tmp_path: Path) -> None:
    """Of four instances, three have no weights of their own there; values are equal."""
    _wide(kind, tmp_path)
    with starting(tmp_path) as start:
        saved = _used(start, tmp_path, "private") - _used(start, tmp_path, "shared")
    assert saved >= 2.9 * _WIDE_BYTES


@_CUDA
@pytest.mark.slow
def test_the_owner_of_weights_killed(tmp_path: Path) -> None:
    """No answer is wrong; afterwards the others refuse all requests."""
    _wide(ArtifactType.MODULE, tmp_path)
    with starting(tmp_path) as start:
        instances = []
        for name in "abc":
            instances.append(start(_INSTANCE, tmp_path, name, "shared"))
            assert instances[-1].hear() == "ready"
        expected = instances[0].ask("answer")
        instances[0].kill()
        for one in instances[1:]:
            answers = [one.ask("answer") for _ in range(20)]
            assert set(answers) <= {expected, "UNAVAILABLE"}
            assert answers[-1] == "UNAVAILABLE"


def test_a_device_that_is_missing(tmp_path: Path, process: None) -> None:
    """A GPU that this machine lacks is refused with what it has."""
    arguments = fake_triton.arguments(scenarios.TABLE[0].lay_out(tmp_path))
    with pytest.raises(fake_triton.TritonModelException, match="asks for GPU 99"):
        TritonPythonModel().initialize(
            arguments | {"model_instance_kind": "GPU", "model_instance_device_id": "99"}
        )


_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


# --- streams and devices: what runs on a stream is waited for, and what is read on it is there ----


class Far(torch.nn.Module):
    """Computes on another GPU, for long, and leaves its output there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", torch.eye(4096, device="cuda:0"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        far = x.to("cuda:1")
        work = self.weight.to("cuda:1")
        for _ in range(50):
            work = work @ work
        return far * 2 * work[0, 0]


@_CUDA
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_an_output_on_another_device_is_waited_for(tmp_path: Path, process: None) -> None:
    """KIND_MODEL: a copy runs on the current stream of its source's device.

    See Tensor.copy_ in ATen/native/cuda/Copy.cu, which takes that stream of the source's device.
    """
    scenario = scenarios.Scenario(
        "far",
        scenarios.text(models.source(Far)),
        scenarios.config({"x": [4]}, {"y": [4]}),
    )
    model = TritonPythonModel()
    arguments = fake_triton.arguments(scenario.lay_out(tmp_path))
    model.initialize(arguments | {"model_instance_kind": "MODEL"})
    document = json.loads(arguments["model_config"])
    for number in range(20):
        sent = np.full((1, 4), number, dtype=np.float32)
        (response,) = model.execute([fake_triton.request({"x": sent}, document)])
        (tensor,) = response.output_tensors()
        np.testing.assert_array_equal(tensor.as_numpy(), 2 * sent)


@_CUDA
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4, 5), (2, 3, 4, 0)])
def test_empty_outputs_that_stay_on_the_gpu(shape: tuple[int, ...]) -> None:
    """Triton's utilities compare strides even of a tensor without values.

    torch counts a size of 0 as 1 in strides (c10::TensorImpl), Triton as 0.
    """
    value = torch.empty(shape, device="cuda")
    written = messages.write_tensor("y", value)
    assert tuple(torch.utils.dlpack.from_dlpack(written.to_dlpack()).shape) == shape
