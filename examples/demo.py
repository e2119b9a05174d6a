"""Serve handwritten-digit models with Triton, check every response, measure the speed.

    python examples/demo.py

Starts a real server on free ports, classifies the 450 digits that were held out of training, and
stops the server. Exits with 0 if the accuracy is as required, else with 1.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Annotated

import numpy as np
import typer
from digits_data import (
    REQUIRED_ACCURACY,
    REQUIRED_LINEAR_ACCURACY,
    REQUIRED_ROWS_ACCURACY,
    Digits,
    FloatArray,
    IntArray,
    load_split,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image
from rich.console import Console
from rich.table import Table
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from torch_py_backend.errors import BackendError
from torch_py_backend.server import Server

REPOSITORY = Path(__file__).parent / "model_repository"

CLIENTS = 8
CLIENT_BATCH = 8  # images in each request when throughput is measured
LOGITS_TOLERANCE = 1e-4  # between two ways of running one float32 network

PICTURED = 24
PICTURE_ROWS = 3

LEGEND = f"""
digits              a Python class, model.py, and its weights, model.safetensors
digits_torchscript  the same network as a TorchScript archive: model.pt
digits_exported     the same as a torch.export program: model.pt2
digits_aoti         the same, compiled to machine code by AOTInductor: model.pt2
digits_factory      a linear model: a class of torch and model.safetensors
digits_lstm         a recurrent network that gets an image row by row, in a
                    sequence of eight requests, and keeps state between them
digits_png          the exported network with hooks: PNG files in, labels out

accuracy            share of held-out digits classified correctly; required:
                    {REQUIRED_ACCURACY:.0%}, linear {REQUIRED_LINEAR_ACCURACY:.0%},
                    recurrent {REQUIRED_ROWS_ACCURACY:.0%}
p50, p99            latency with one client that sends one image at a time:
                    median and 99th percentile
images/s            throughput with {CLIENTS} clients and {CLIENT_BATCH} images per request
images per call     mean number of images in one call of the model
"""

console = Console(highlight=False, markup=False)


class DemoError(Exception):
    """The demonstration failed; the message gives the reason."""


@dataclass(frozen=True)
class Endpoint:
    """One served model: its name and those of its only input and output.

    Endpoints of the same `network` have the same weights. `required` is the minimum accuracy.
    """

    model: str
    input: str
    output: str
    network: str = "CNN"
    required: float = REQUIRED_ACCURACY


ENDPOINTS = (
    Endpoint("digits", "image", "logits"),
    Endpoint("digits_torchscript", "INPUT__0", "OUTPUT__0"),
    Endpoint("digits_exported", "image", "OUTPUT__0"),
    Endpoint("digits_aoti", "INPUT__0", "OUTPUT__0"),
    Endpoint("digits_factory", "input", "logits", "linear", REQUIRED_LINEAR_ACCURACY),
)


RECURRENT = "digits_lstm"
# Takes image files and returns labels.
PIPELINE = "digits_png"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Speed:
    """`p50` and `p99` in milliseconds; `throughput` in images per second.

    `batch` is the mean number of images in one call of the model.
    """

    p50: float
    p99: float
    throughput: float
    batch: float


@contextmanager
def running_server(log: IO[str]) -> Iterator[str]:
    """Serve all models of the demonstration; yield the gRPC address."""
    with Server(REPOSITORY, http_port=0, grpc_port=0, metrics_port=0, log=log) as server:
        reasons = {state.name: state.reason for state in server.wait_loaded() if not state.ready}
        for model in (*(endpoint.model for endpoint in ENDPOINTS), RECURRENT, PIPELINE):
            if model in reasons:
                raise DemoError(f"{model} did not load: {reasons[model]}")
        yield server.grpc_address


def ask(client: InferenceServerClient, endpoint: Endpoint, images: FloatArray) -> FloatArray:
    """Send images [n, 1, 8, 8] in one request; return logits [n, 10]."""
    tensor = InferInput(endpoint.input, list(images.shape), "FP32")
    tensor.set_data_from_numpy(images)
    logits: FloatArray | None = client.infer(endpoint.model, [tensor]).as_numpy(endpoint.output)
    if logits is None:
        raise DemoError(f"{endpoint.model} returned no {endpoint.output}.")
    return logits


def ask_all(address: str, endpoint: Endpoint, images: FloatArray) -> FloatArray:
    """Return the logits of all images, in requests of the maximum size."""
    with InferenceServerClient(address) as client:
        largest: int = client.get_model_config(endpoint.model).config.max_batch_size
        starts = range(0, len(images), largest)
        return np.concatenate([ask(client, endpoint, images[i : i + largest]) for i in starts])


def read_rows(address: str, images: FloatArray) -> FloatArray:
    """Return the logits of all images, each sent row by row as one sequence."""

    def read(numbered: tuple[int, FloatArray]) -> FloatArray:
        number, image = numbered
        for place, row in enumerate(image[0]):
            tensor = InferInput("row", [1, len(row)], "FP32")
            tensor.set_data_from_numpy(row[None])
            answer = client.infer(
                RECURRENT,
                [tensor],
                sequence_id=number,
                sequence_start=place == 0,
                sequence_end=place == len(image[0]) - 1,
            )
        logits: FloatArray = answer.as_numpy("logits")
        return logits

    with InferenceServerClient(address) as client, ThreadPoolExecutor(CLIENTS) as readers:
        return np.concatenate(list(readers.map(read, enumerate(images, 1))))


def png(image: FloatArray) -> bytes:
    """Return a digit as an image file, dark ink (0 to 16) on light paper."""
    paper = np.rint(255.0 * (1.0 - image / 16.0)).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(paper).save(file, format="PNG")
    return file.getvalue()


def read_files(address: str, files: list[bytes]) -> list[str]:
    """Return the labels of image files, one request each."""
    names = []
    with InferenceServerClient(address) as client:
        for file in files:
            tensor = InferInput("image", [1, 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[file]], dtype=np.object_))
            label = client.infer(PIPELINE, [tensor]).as_numpy("label")
            if label is None:
                raise DemoError(f"{PIPELINE} returned no label.")
            names.append(label[0, 0].decode())
    return names


def check_files(address: str, digits: Digits) -> float:
    """Return the share of correct labels of image files."""
    named = read_files(address, [png(image[0]) for image in digits.images])
    expected = [NAMES[label] for label in digits.labels]
    share = sum(map(str.__eq__, named, expected)) / len(expected)
    if share < REQUIRED_ACCURACY:
        raise DemoError(f"{PIPELINE} labeled only {share:.1%} of the held-out digits correctly.")
    return share


def check_agreement(logits: dict[str, FloatArray]) -> None:
    """Check that models with the same weights return the same scores."""
    first: dict[str, str] = {}
    for endpoint in ENDPOINTS:
        model, other = endpoint.model, first.setdefault(endpoint.network, endpoint.model)
        difference = float(np.abs(logits[model] - logits[other]).max())
        if not difference <= LOGITS_TOLERANCE:  # also if it is NaN
            raise DemoError(f"{other} and {model} differ by up to {difference:g} in their logits.")


def accuracy(logits: FloatArray, labels: IntArray) -> float:
    return float((logits.argmax(axis=1) == labels).mean())


def check_accuracy(shares: dict[str, float]) -> None:
    for endpoint in ENDPOINTS:
        share = shares[endpoint.model]
        if share < endpoint.required:
            raise DemoError(
                f"{endpoint.model} classified only {share:.1%} of the held-out digits correctly; "
                f"at least {endpoint.required:.0%} are required."
            )


def repeat_for(seconds: float, action: Callable[[], object]) -> list[float]:
    """Call `action` repeatedly for `seconds`; return each duration in seconds."""
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or not durations:
        action()
        durations.append(time.perf_counter() - start)
    return durations


def measure_latency(
    address: str, endpoint: Endpoint, image: FloatArray, seconds: float
) -> FloatArray:
    """Return latencies in milliseconds, with one client and one image at a time."""
    with InferenceServerClient(address) as client:
        durations = repeat_for(seconds, lambda: ask(client, endpoint, image))
    return np.asarray(durations, dtype=np.float32) * 1000


def measure_throughput(
    address: str, endpoint: Endpoint, images: FloatArray, seconds: float
) -> float:
    """Return images per second with many clients, so that Triton forms batches."""

    def requests_of_one_client(_: int) -> int:
        with InferenceServerClient(address) as client:
            return len(repeat_for(seconds, lambda: ask(client, endpoint, images)))

    start = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        requests = sum(clients.map(requests_of_one_client, range(CLIENTS)))
    return requests * len(images) / (time.perf_counter() - start)


def work_done(address: str, endpoint: Endpoint) -> tuple[int, int]:
    """Return Triton's counts of images and calls of the model."""
    with InferenceServerClient(address) as client:
        (statistics,) = client.get_inference_statistics(endpoint.model).model_stats
        return statistics.inference_count, statistics.execution_count


def measure(address: str, endpoint: Endpoint, images: FloatArray, seconds: float) -> Speed:
    latencies = measure_latency(address, endpoint, images[:1], seconds)
    images_before, calls_before = work_done(address, endpoint)
    throughput = measure_throughput(address, endpoint, images[:CLIENT_BATCH], seconds)
    images_after, calls_after = work_done(address, endpoint)
    return Speed(
        p50=float(np.percentile(latencies, 50)),
        p99=float(np.percentile(latencies, 99)),
        throughput=throughput,
        batch=(images_after - images_before) / (calls_after - calls_before),
    )


def result_table(shares: dict[str, float], speeds: dict[str, Speed]) -> Table:
    table = Table(
        title="Handwritten digits served by Triton, backend pytorch_py", title_justify="left"
    )
    table.add_column("model", no_wrap=True)
    for heading in ("accuracy", "p50", "p99", "images/s", "images\nper call"):
        table.add_column(heading, justify="right")
    for endpoint in ENDPOINTS:
        speed = speeds[endpoint.model]
        table.add_row(
            endpoint.model,
            f"{shares[endpoint.model]:.2%}",
            f"{speed.p50:.2f} ms",
            f"{speed.p99:.2f} ms",
            f"{speed.throughput:,.0f}",
            f"{speed.batch:.1f}",
        )
    return table


def chosen_for_picture(predicted: IntArray, labels: IntArray) -> IntArray:
    """Return indices of correctly classified digits, followed by misclassified ones."""
    misread = np.flatnonzero(predicted != labels)[:PICTURED]
    correct = np.flatnonzero(predicted == labels)[: PICTURED - len(misread)]
    return np.concatenate([correct, misread])


def draw_digit(axes: Axes, image: FloatArray, label: int, reading: int) -> None:
    axes.imshow(image, cmap="gray_r", vmin=0, vmax=16)
    axes.set_xticks([])
    axes.set_yticks([])
    correct = reading == label
    axes.set_title(
        f"{reading}" if correct else f"{reading}  (is {label})",
        color="black" if correct else "red",
        fontsize=13,
    )
    for edge in axes.spines.values():
        edge.set_color("lightgray" if correct else "red")


def draw(digits: Digits, predicted: IntArray, path: Path) -> None:
    """Save a grid of held-out digits with their predictions."""
    # A Figure without pyplot uses Agg and needs no display.
    figure = Figure(figsize=(10, 5.2), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.07))
    correct = int((predicted == digits.labels).sum())
    figure.suptitle(
        f"{correct} of {len(predicted)} held-out digits classified correctly; errors in red",
        fontsize=14,
    )
    grid = figure.subplots(PICTURE_ROWS, PICTURED // PICTURE_ROWS)
    chosen = chosen_for_picture(predicted, digits.labels)
    for axes, index in zip(grid.flat, chosen, strict=True):
        draw_digit(axes, digits.images[index, 0], digits.labels[index], predicted[index])
    figure.savefig(path, dpi=120)


def demonstrate(output: Path, log: Path, seconds: float) -> None:
    held_out = load_split().held_out
    # A network this small is fastest with one thread; not every config here sets it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console.print("Starting Triton and loading the models ...")
    with log.open("w") as lines, running_server(lines) as address:
        console.print(f"Classifying {len(held_out.labels)} held-out digits ...")
        logits = {e.model: ask_all(address, e, held_out.images) for e in ENDPOINTS}
        shares = {name: accuracy(scores, held_out.labels) for name, scores in logits.items()}
        check_accuracy(shares)
        check_agreement(logits)
        by_rows = accuracy(read_rows(address, held_out.images), held_out.labels)
        if by_rows < REQUIRED_ROWS_ACCURACY:
            raise DemoError(f"{RECURRENT} classified only {by_rows:.1%} of the digits correctly.")
        named = check_files(address, held_out)
        console.print(f"{PIPELINE} labels {named:.2%} of the PNG files correctly.")
        console.print(f"Measuring, {seconds:g} s per figure ...")
        speeds = {e.model: measure(address, e, held_out.images, seconds) for e in ENDPOINTS}
    draw(held_out, logits[ENDPOINTS[0].model].argmax(axis=1), output)
    console.print(result_table(shares, speeds))
    console.print(f"{RECURRENT} classified {by_rows:.2%} of the digits correctly, row by row.")
    console.print(LEGEND)
    console.print(
        "Passed: the same weights give the same logits, and each model has the required accuracy.",
        style="green",
    )
    console.print(f"Picture of {PICTURED} digits: {output}", soft_wrap=True)


def main(
    output: Annotated[Path, typer.Option(help="Where to save the picture.")] = Path("demo.png"),
    seconds: Annotated[float, typer.Option(help="Time for each measurement.", min=0)] = 1.0,
) -> None:
    """Serve handwritten-digit models with Triton, check every response, measure the speed."""
    log = output.with_suffix(".log")
    try:
        demonstrate(output, log, seconds)
    except (DemoError, BackendError, InferenceServerException) as error:
        console.print(f"The demonstration failed: {error}", style="red", soft_wrap=True)
        console.print(f"Server log: {log}", soft_wrap=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
