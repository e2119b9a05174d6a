"""A pipeline in one folder, with hooks: against an ensemble, and with a second instance.

    python -m benchmarks.hooks [--side 128] [--concurrency 1,8,32] [--seconds 5] [--pairs 3]

The input is an image file, the output the name of a digit. One folder has the network and hooks
that decode the file and name the digit; the ensemble has a Python model that decodes, the network,
and a Python model that names. All run in one server. Their outputs are compared; then they are
loaded in turn, A B A B.

The second table compares one instance with two, whose hooks decode files while the other's module
computes. The device is simulated: forward() sleeps for each row (--device) and holds a lock. It
needs no CPU, as a GPU's work, so the figures show the overlap, but are not those of a GPU. With
--device 0 they show the gain of a second core alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import tritonclient.grpc
from numpy.typing import NDArray
from PIL import Image

from benchmarks import harness
from benchmarks.harness import Pair
from benchmarks.payloads import Tensor
from benchmarks.tables import markdown, spread
from torch_py_backend.errors import ToolError

_EXAMPLE = Path(__file__).parents[1] / "examples" / "model_repository" / "digits_png"
_IMAGES = 64
_DECODE = """
from io import BytesIO

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        files = pb_utils.get_input_tensor_by_name(request, "image").as_numpy()
        images = np.stack([self._decoded(file) for file in files.ravel()])
        return pb_utils.InferenceResponse([pb_utils.Tensor("pixels", images)])

    def _decoded(self, file):
        paper = Image.open(BytesIO(file)).convert("L").resize((8, 8), Image.Resampling.BOX)
        return 16.0 * (1.0 - np.array(paper, dtype=np.float32)[None] / 255.0)
"""
_NAME = """
from pathlib import Path
from typing import NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"]) / args["model_version"]
        self.labels = np.array((folder / "labels.txt").read_text().split(), dtype=object)

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        logits = pb_utils.get_input_tensor_by_name(request, "logits").as_numpy()
        powers = np.exp(logits - logits.max(1, keepdims=True))
        shares = powers / powers.sum(1, keepdims=True)
        best = shares.argmax(1)[:, None]
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("label", self.labels[best]),
                pb_utils.Tensor("probability", np.take_along_axis(shares, best, 1)),
            ]
        )
"""
_FILE = '[{ name: "image" data_type: TYPE_STRING dims: [ 1 ] }]'
_PIXELS = '{ name: "pixels" data_type: TYPE_FP32 dims: [ 1, 8, 8 ] }'
_LOGITS = '{ name: "logits" data_type: TYPE_FP32 dims: [ 10 ] }'
_ANSWER = """[
  { name: "label" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "probability" data_type: TYPE_FP32 dims: [ 1 ] }
]"""
_BATCHED = """max_batch_size: 64
dynamic_batching { }
instance_group [{ kind: KIND_CPU count: 1 }]
"""
_CONFIGS = {
    "decode": f'backend: "python"\n{_BATCHED}input {_FILE}\noutput [{_PIXELS}]\n',
    "network": 'backend: "pytorch_py"\n'
    + _BATCHED
    + f"input [{_PIXELS}]\noutput [{_LOGITS}]\n"
    + 'parameters { key: "NUM_THREADS" value { string_value: "1" } }\n',
    "name": f'backend: "python"\n{_BATCHED}input [{_LOGITS}]\noutput {_ANSWER}\n',
    "ensemble": f"""platform: "ensemble"
max_batch_size: 64
input {_FILE}
output {_ANSWER}
ensemble_scheduling {{
  step [
    {{ model_name: "decode" model_version: -1
      input_map {{ key: "image" value: "image" }}
      output_map {{ key: "pixels" value: "pixels" }} }},
    {{ model_name: "network" model_version: -1
      input_map {{ key: "pixels" value: "pixels" }}
      output_map {{ key: "logits" value: "logits" }} }},
    {{ model_name: "name" model_version: -1
      input_map {{ key: "logits" value: "logits" }}
      output_map {{ key: "label" value: "label" }}
      output_map {{ key: "probability" value: "probability" }} }}
  ]
}}
""",
}
# A simulated device: a row takes a fixed time and no CPU, and batches run one after another.
_DEVICE = """
import fcntl
import time
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn


class Device(nn.Module):
    def __init__(self, milliseconds):
        super().__init__()
        self.seconds = milliseconds / 1000
        self.lock = open(Path(__file__).parents[1] / "device.lock", "w")

    def forward(self, pixels: Tensor) -> Tensor:
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        time.sleep(self.seconds * pixels.shape[0])
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        return pixels.mean((1, 2, 3)).unsqueeze(1)


class Hooks:
    def preprocess(self, image: bytes) -> Tensor:
        paper = Image.open(BytesIO(image)).convert("L").resize((8, 8), Image.Resampling.BOX)
        return torch.from_numpy(np.array(paper, dtype=np.float32))[None]
"""
_INSTANCES = """backend: "pytorch_py"
max_batch_size: 64
dynamic_batching {{ }}
input [{{ name: "image" data_type: TYPE_STRING dims: [ 1 ] }}]
output [{{ name: "grey" data_type: TYPE_FP32 dims: [ 1 ] }}]
instance_group [{{ kind: KIND_CPU count: {count} }}]
parameters {{ key: "MODEL_KWARGS" value {{ string_value: "{{\\"milliseconds\\": {device}}}" }} }}
parameters {{ key: "NUM_THREADS" value {{ string_value: "1" }} }}
parameters {{ key: "WEIGHTS" value {{ string_value: "none" }} }}
parameters {{ key: "WARMUP" value {{ string_value: "false" }} }}
"""
_THREADS = """
parameters {{ key: "PREPROCESS_THREADS" value {{ string_value: "{}" }} }}
"""
_ONE, _THREE = "digits_png", "ensemble"


def main(words: Sequence[str] | None = None) -> None:
    """Compare answers, measure, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--side", type=int, default=128, help="pixels, of square images")
    parser.add_argument("--threads", type=int, help="PREPROCESS_THREADS of the one folder")
    parser.add_argument("--device", default="0,1,4", help="milliseconds of a device for a row")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--pairs", type=int, default=3)
    settings = parser.parse_args(words)
    counts = [int(count) for count in settings.concurrency.split(",")]
    devices = [float(device) for device in settings.device.split(",")]
    images = files(settings.side)
    with harness.scratch() as scratch:
        repository = write_pipelines(Path(scratch) / "repository", settings.threads)
        for device in devices:
            write_instances(repository, device)
        with harness.served(repository) as server:
            compare(server.grpc_address, images)

            def row(models: tuple[str, str], count: int) -> list[str]:
                measured = measure(
                    server.grpc_address, models, images, count, settings.seconds, settings.pairs
                )
                return figures(asyncio.run(measured))

            print(
                f"{_IMAGES} JPEG files of {settings.side} by {settings.side} pixels, one a request"
            )
            rows = [[str(count), *row((_ONE, _THREE), count)] for count in counts]
            print(markdown(_columns("one folder", "ensemble"), rows))
            rows = [
                [f"{device:g}", str(count), *row(_instances(device), count)]
                for device, count in itertools.product(devices, counts)
            ]
            columns = ["device, ms a row", *_columns("2 instances", "1 instance")]
            print("\n" + markdown(columns, rows))


def _columns(first: str, second: str) -> list[str]:
    return ["in flight", f"{first}, req/s", "p50 ms", f"{second}, req/s", "p50 ms", "ratio"]


def files(side: int) -> list[bytes]:
    """Return random pictures as JPEG: the cost of decoding does not depend on their content."""
    random = np.random.default_rng(0)
    images = []
    for _ in range(_IMAGES):
        coarse = random.integers(0, 256, (8, 8), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)
        file = BytesIO()
        image.convert("RGB").save(file, format="JPEG")
        images.append(file.getvalue())
    return images


def write_pipelines(repository: Path, threads: int | None) -> Path:
    """Write both pipelines as models of one repository."""
    shutil.copytree(_EXAMPLE, repository / _ONE)
    if threads is not None:
        with (repository / _ONE / "config.pbtxt").open("a") as file:
            file.write(_THREADS.format(threads))
    code = {"decode": _DECODE, "name": _NAME}
    for name, config in _CONFIGS.items():
        sources = {"model.py": code[name]} if name in code else {}
        harness.write_model(repository / name, config, sources)
    shutil.copyfile(_EXAMPLE / "1" / "labels.txt", repository / "name" / "1" / "labels.txt")
    shutil.copyfile(_EXAMPLE / "1" / "model.pt2", repository / "network" / "1" / "model.pt2")
    return repository


def write_instances(repository: Path, device: float) -> None:
    """Write a model with two instances, and one with one instance, on such a device."""
    for name, count in zip(_instances(device), (2, 1), strict=True):
        config = _INSTANCES.format(count=count, device=device)
        harness.write_model(repository / name, config, {"model.py": _DEVICE})


def _instances(device: float) -> tuple[str, str]:
    return f"two_{device:g}", f"one_{device:g}"


def compare(address: str, images: Sequence[bytes]) -> None:
    """Raise if the pipelines answer differently.

    Raises:
        ToolError: they name different digits.
    """
    tensor = tritonclient.grpc.InferInput("image", [len(images), 1], "BYTES")
    tensor.set_data_from_numpy(_column(images))
    with tritonclient.grpc.InferenceServerClient(address) as client:
        single, ensemble = (client.infer(name, [tensor]) for name in (_ONE, _THREE))
    if not (single.as_numpy("label") == ensemble.as_numpy("label")).all():
        raise ToolError("the pipelines name different digits.")
    np.testing.assert_allclose(
        single.as_numpy("probability"), ensemble.as_numpy("probability"), rtol=1e-4, atol=1e-6
    )


def _column(images: Sequence[bytes]) -> NDArray[np.object_]:
    return np.array([[image] for image in images], dtype=np.object_)


async def measure(
    address: str,
    models: tuple[str, str],
    images: Sequence[bytes],
    concurrency: int,
    seconds: float,
    pairs: int,
) -> list[Pair]:
    """Load two models in turn, with one image in a request."""
    payloads = [{"image": Tensor("BYTES", _column([image]))} for image in images]
    async with (
        harness.connected(address, "grpc", models[0], payloads) as first,
        harness.connected(address, "grpc", models[1], payloads) as second,
    ):
        turns = [partial(harness.turn, one, concurrency, seconds) for one in (first, second)]
        return [pair async for pair in harness.in_turn(turns, pairs)]


def figures(pairs: Sequence[Pair]) -> list[str]:
    """Return the medians of the turns, and that of the ratios within the pairs."""
    cells = []
    for points in zip(*pairs, strict=True):
        rate = spread([point.result.throughput for point in points]).median
        p50 = spread([point.result.percentiles(50)[0] for point in points]).median
        cells += [f"{rate:,.0f}", f"{1e3 * p50:.2f}"]
    return [*cells, spread(harness.ratios(pairs)).text(2)]


if __name__ == "__main__":
    main()
