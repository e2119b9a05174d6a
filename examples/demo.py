"""Compare this backend with a Python backend model written by hand, in about a minute.

    python examples/demo.py

One tritonserver serves a ResNet-50 and a small text encoder, each twice: with this backend
(examples/demo_models/*.pbtxt) and by hand (examples/demo_models/by_hand.py). The weights are
random: the demo compares how the models are served. It prints a line for each step and a table,
and draws a picture. Its exit code is 0 if every check passed, else 1.
"""

import contextlib
import queue
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeAlias

import demo_report
import numpy as np
import psutil
import typer
from demo_models.encoder import VOCABULARY
from demo_models.networks import TEXTS, Array, Network, build_encoder, build_resnet
from demo_report import Differences, Figures, Pair, Recovery
from rich.console import Console
from tritonclient.grpc import InferInput
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

import torch_py_backend
from torch_py_backend import LocalServer
from torch_py_backend.errors import BackendError

EXAMPLES = Path(__file__).parent
STREAMS = "sonnets"  # from examples/model_repository
PROMPT, LENGTH = "Shall I compare", 200

TOLERANCE = 1e-4  # float32 sums in another order; the results are around 1
BAD_ROUNDS = 5
GOOD_REQUESTS = BAD_ROUNDS * (TEXTS - 1)
PAIRS = 6
PATIENCE_S = 120.0
# By default Triton waits 30 s for loads in progress and for the instance that a step kills.
STOP = ("--exit-timeout-secs=5",)

NEXT = """\
Try next:
  make serve                                        serve the models of examples/model_repository
  .venv/bin/python examples/stream_sonnets.py       ... and stream a text from one of them
  .venv/bin/torch-py-backend check examples/model_repository
                                                    load them without a server
  docs/quickstart.md                                serve a module of your own, from Python"""

Show: TypeAlias = Callable[[str], None]
console = Console(highlight=False, markup=False, soft_wrap=True)


class DemoError(Exception):
    """A check failed; the message is one sentence."""


def infer(server: LocalServer, model: str, network: Network, row: Array) -> Array:
    """Send one row and return its result; raise InferenceServerException for an error."""
    tensor = InferInput(network.input, [1, *row.shape], np_to_triton_dtype(row.dtype))
    tensor.set_data_from_numpy(row[None])
    result: Array = server.client.infer(model, [tensor]).as_numpy(network.output)[0]
    return result


def try_infer(server: LocalServer, model: str, network: Network, row: Array) -> Array | None:
    """Send one row; return its result, or None if the response is an error."""
    with contextlib.suppress(InferenceServerException):
        return infer(server, model, network, row)
    return None


def instances(model: str) -> list[psutil.Process]:
    """Return the processes of a model's instances."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process has ended
            command = " ".join(process.cmdline()[:2])
            if "_backend_stub " in command and f"/{model}/" in command:
                processes.append(process)
    return processes


def compare_answers(server: LocalServer, networks: Sequence[Network], show: Show) -> Differences:
    """Return the largest differences from eager PyTorch, by the name of the network."""
    differences = {}
    for network in networks:
        show(f"comparing {network.name} with eager PyTorch")
        ours, by_hand = (largest_difference(server, name, network) for name in network.models)
        differences[network.name] = ours, by_hand
    worst = max(ours for ours, _ in differences.values())
    show(f"equal those of eager PyTorch to {worst:.0e}")
    return differences


def largest_difference(server: LocalServer, model: str, network: Network) -> float:
    """Send all rows at the same time; return the largest difference from eager PyTorch."""
    with ThreadPoolExecutor(len(network.rows)) as pool:
        results = list(pool.map(lambda row: infer(server, model, network, row), network.rows))
    difference = float(np.abs(np.stack(results) - network.expected).max())
    if not difference <= TOLERANCE:  # also if it is NaN
        raise DemoError(f"{model} differs from eager PyTorch by up to {difference:g}.")
    return difference


def compare_memory(network: Network, small: Network, show: Show) -> tuple[Pair, Pair]:
    """Return the megabytes of a network's instances, and of as many of a small network."""
    memory, base = ((megabytes(each.name), megabytes(each.by_hand)) for each in (network, small))
    count = len(instances(network.name)) / len(instances(small.name))
    show(f"four ResNet-50 use {memory[0]:,.0f} MB, by hand {memory[1]:,.0f} MB")
    return memory, (count * base[0], count * base[1])


def megabytes(model: str) -> float:
    """Return the memory of all instances as PSS: a page that n processes share counts 1/n."""
    return float(sum(process.memory_full_info().pss for process in instances(model))) / 1e6


def compare_bad_requests(server: LocalServer, network: Network, show: Show) -> tuple[int, int]:
    """Return how many good requests are answered in batches that contain a bad one."""
    show("sending batches with an invalid token id in one request")
    before = count_batches(server, network.name)
    good, good_by_hand = (count_good_answers(server, name, network) for name in network.models)
    batches = count_batches(server, network.name) - before
    if good < GOOD_REQUESTS:
        raise DemoError(f"only {good} of {GOOD_REQUESTS} requests beside bad ones were answered.")
    if batches > GOOD_REQUESTS / 2:
        raise DemoError(f"the bad requests shared no batch with others: {batches} batches.")
    show(
        f"{good} of {GOOD_REQUESTS} good requests in a batch with a bad one are answered,"
        f" by hand {good_by_hand}"
    )
    return good, good_by_hand


def count_batches(server: LocalServer, model: str) -> int:
    """Return how many batches Triton has given to a model."""
    (statistics,) = server.client.get_inference_statistics(model).model_stats
    return int(statistics.execution_count)


def count_good_answers(server: LocalServer, model: str, network: Network) -> int:
    """Send all rows at the same time, one of them invalid; count the right answers to the rest."""
    rows = network.rows.copy()
    rows[0, 0] = VOCABULARY
    count = 0
    with ThreadPoolExecutor(len(rows)) as pool:
        for _ in range(BAD_ROUNDS):
            bad, *others = pool.map(lambda row: try_infer(server, model, network, row), rows)
            if bad is not None:
                raise DemoError(f"{model} answered a request with an invalid token id.")
            count += sum(
                answer is not None and np.allclose(answer, expected, atol=TOLERANCE)
                for answer, expected in zip(others, network.expected[1:], strict=True)
            )
    return count


def compare_throughput(
    server: LocalServer, network: Network, seconds: float, show: Show
) -> tuple[list[float], list[float]]:
    """Return requests per second, measured in turn: A B B A, since a machine's speed drifts."""
    rates: dict[str, list[float]] = {model: [] for model in network.models}
    for pair in range(PAIRS + 1):
        show(f"{network.name}, pair {pair} of {PAIRS}" if pair else f"{network.name}, warm-up")
        for model in network.models[:: -1 if pair % 2 else 1]:
            rates[model].append(throughput(server, model, network, seconds))
    ours, by_hand = (turns[1:] for turns in rates.values())  # without the warm-up
    show(f"{network.name} {median(ours):,.0f} requests/s, by hand {median(by_hand):,.0f}")
    return ours, by_hand


def throughput(server: LocalServer, model: str, network: Network, seconds: float) -> float:
    """Return requests per second, with one request of each row in flight."""
    start = time.perf_counter()

    def infer_repeatedly(row: Array) -> int:
        count = 0
        while not count or time.perf_counter() < start + seconds:
            infer(server, model, network, row)
            count += 1
        return count

    with ThreadPoolExecutor(len(network.rows)) as pool:
        requests = sum(pool.map(infer_repeatedly, network.rows))
    return requests / (time.perf_counter() - start)


def stream(server: LocalServer, show: Show) -> tuple[float, float]:
    """Show a text as it arrives; return the seconds to its first and last character."""
    prompt = InferInput("prompt", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([PROMPT.encode()], dtype=np.object_))
    length = InferInput("length", [1], "INT32")
    length.set_data_from_numpy(np.array([LENGTH], dtype=np.int32))
    responses: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
    server.client.start_stream(lambda result, error: responses.put((result, error)))
    start = time.perf_counter()
    server.client.async_stream_infer(STREAMS, [prompt, length])
    text = PROMPT
    times: list[float] = []
    while len(times) < LENGTH:
        try:
            result, error = responses.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise DemoError(f"the stream stopped after {len(times)} characters.") from None
        if error is not None:
            raise error
        times.append(time.perf_counter() - start)
        text += result.as_numpy("text")[0].decode()
        show(indent(text))
    server.client.stop_stream()
    first, last = times[0] * 1e3, times[-1] * 1e3
    show(f"{LENGTH} characters: first after {first:.0f} ms, last after {last:.0f} ms{indent(text)}")
    return times[0], times[-1]


def indent(text: str) -> str:
    """Return the lines of a text, to be printed below a step."""
    return "".join(f"\n     | {line}" for line in text.splitlines())


def kill(server: LocalServer, victim: Network, other: Network, show: Show) -> Recovery:
    """Kill the instances of one network with -9 while another one answers."""
    show(f"kill -9 of the processes of {victim.name}")
    healed = threading.Event()
    answered: list[bool] = []

    def infer_other() -> None:
        while not healed.is_set():
            result = try_infer(server, other.name, other, other.rows[0])
            answered.append(result is not None)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(infer_other)
        try:
            start = time.perf_counter()
            for model in victim.models:
                for process in instances(model):
                    process.kill()
            while try_infer(server, victim.name, victim, victim.rows[0]) is None:
                if time.perf_counter() > start + PATIENCE_S:
                    raise DemoError(f"{victim.name} did not answer again after kill -9.")
                time.sleep(0.02)
            seconds = time.perf_counter() - start
        finally:
            healed.set()
    asking.result()  # raises what the thread raised
    if failures := answered.count(False):
        raise DemoError(f"{failures} of {len(answered)} requests to {other.name} failed meanwhile.")
    by_hand = try_infer(server, victim.by_hand, victim, victim.rows[0]) is not None
    show(
        f"{victim.name} answers {seconds:.1f} s after kill -9, by hand"
        f" {'too' if by_hand else 'not yet'}; {other.name} all the time"
    )
    return Recovery(seconds, by_hand, len(answered), failures)


class Steps:
    """A spinner while a step runs, then one line with its result."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._number = 0

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[Show]:
        """Yield a function that shows a text; the last text is the result."""
        self._number += 1
        start = f"{self._number}/{self._count}  {title:<12}"
        texts = [""]
        with console.status(start) as status:

            def show(text: str) -> None:
                texts.append(text)
                status.update(f"{start} {text}")

            yield show
        console.print(f"{start} {texts[-1]}")


def measure(
    server: LocalServer, resnet: Network, encoder: Network, seconds: float, steps: Steps
) -> Figures:
    """Run the steps on a server; raise DemoError if a check fails."""
    with steps.step("Answers") as show:
        differences = compare_answers(server, (resnet, encoder), show)
    with steps.step("Memory") as show:
        memory, base = compare_memory(resnet, encoder, show)
    with steps.step("Bad requests") as show:
        good = compare_bad_requests(server, encoder, show)
    with steps.step("Throughput") as show:
        rates = compare_throughput(server, encoder, seconds, show)
    with steps.step("Stream") as show:
        times = stream(server, show)
    with steps.step("Recovery") as show:
        recovery = kill(server, encoder, resnet, show)
    return Figures(differences, memory, base, good, GOOD_REQUESTS, rates, times, recovery)


def main(
    output: Annotated[Path, typer.Option(help="Where to save the picture.")] = Path("demo.png"),
    seconds: Annotated[float, typer.Option(help="Time for each throughput.", min=0)] = 1.5,
) -> None:
    """Compare this backend with a Python backend model written by hand."""
    if not output.parent.is_dir():
        raise typer.BadParameter(f"{output.parent} is not a folder.")
    console.print("torch-py-backend beside a model by hand, examples/demo_models/by_hand.py")
    start = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server is stopped, too
    try:
        with tempfile.TemporaryDirectory(prefix="demo-") as folder, contextlib.ExitStack() as stack:
            repository = Path(folder)
            steps = Steps(7)
            with steps.step("Server") as show:
                show("building a ResNet-50 and a text encoder")
                resnet, encoder = build_resnet(), build_encoder(EXAMPLES / "sonnets.txt")
                for network in (resnet, encoder):
                    network.write(repository)
                shutil.copytree(EXAMPLES / "model_repository" / STREAMS, repository / STREAMS)
                names = [path.name for path in repository.iterdir()]
                show(f"loading {len(names)} models")
                server = stack.enter_context(torch_py_backend.serve(repository, arguments=STOP))
                stack.callback(console.print, "Stopping the server ...")
                processes = sum(len(instances(name)) for name in names)
                show(f"tritonserver serves {len(names)} models in {processes} processes")
            figures = measure(server, resnet, encoder, seconds, steps)
            demo_report.draw(figures, output)
            console.print()
            console.print(demo_report.table(figures), soft_wrap=False)
            console.print(f"Picture: {output}")
    except (DemoError, BackendError, InferenceServerException) as error:
        console.print(f"The demo failed: {error}", style="red")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("Interrupted.")
        raise typer.Exit(130) from None
    console.print(f"All checks passed in {time.monotonic() - start:.0f} s.", style="green")
    console.print(f"\n{NEXT}")


if __name__ == "__main__":
    typer.run(main)
