"""What sequences cost: steps of an LSTM with state, against the same model without one.

    python -m benchmarks.sequences [--sequences 1000] [--steps 100] [--pairs 3] [--against CHECKOUT]

All sequences run at the same time over a few gRPC connections; the next step of a sequence is sent
when the last one is answered. (Streams crash tritonserver 24.10 now and then, with any backend: a
race when requests are released.) The values of all steps are compared with eager PyTorch's. Then
three models are measured in turn, A B C A B C …: the model with state, "scheduled" and "stateless".
The last two get zeros as state each time; "scheduled" has the same sequence_batching, so that the
cost of Triton's scheduler is separate from that of states; "stateless" has dynamic_batching. All
compute the same and batch as many rows. `--against` adds a model with state that is served by the
backend of another checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import safetensors.torch
import torch
import tritonclient.grpc
from numpy.typing import NDArray
from torch import Tensor, nn
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks import harness, load_generator, stubs
from benchmarks.tables import markdown, spread

_WIDTH = 128
_MODULE = """
import torch
from torch import nn


class Step(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x, hidden=None, cell=None):
        state = None if hidden is None else (hidden, cell)
        hidden, cell = self.cell(x, state)
        return {"y": hidden, "new_hidden": hidden, "new_cell": cell}
"""
_CONFIG = """\
backend: "{backend}"
max_batch_size: 64
input [{{ name: "x" data_type: TYPE_FP32 dims: [{width}] }}]
output [{{ name: "y" data_type: TYPE_FP32 dims: [{width}] }}]
instance_group [{{ kind: KIND_CPU count: 1 }}]
parameters {{ key: "MODEL_KWARGS" value {{ string_value: "{{\\"width\\": {width}}}" }} }}
parameters {{ key: "NUM_THREADS" value {{ string_value: "1" }} }}
{scheduler}
"""
_STATE = 'input_name: "{0}" output_name: "new_{0}" data_type: TYPE_FP32 dims: [{1}]'
_OLDEST = "oldest {{ max_candidate_sequences: {0} }} max_sequence_idle_microseconds: 60000000"
_STATEFUL = "state"
_SCHEDULED = "scheduled"
_STATELESS = "stateless"
_OTHER = "other"
_CONNECTIONS = 4
_LONGEST_S = 600
_COLUMNS = (
    "model", "steps/s", "mean batch", "µs a step in the backend", "time ÷ scheduled",
    "time ÷ stateless", "÷ other",
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """All steps of one model.

    Attributes:
        seconds: from the first request to the last response.
        batch: mean rows in a call of the model.
        inside: mean seconds that a step spent in our backend, less those of its batch's others.
        values: the outputs, [sequences, steps, width].
    """

    seconds: float
    batch: float
    inside: float
    values: NDArray[np.float32]


def scheduler(way: str, sequences: int) -> str:
    """Return the part of the config in which the ways differ."""
    if way == _STATELESS:
        return "dynamic_batching { }"
    oldest = _OLDEST.format(sequences)
    if way == _SCHEDULED:
        return f"sequence_batching {{ {oldest} }}"
    blocks = ", ".join(f"{{ {_STATE.format(name, _WIDTH)} }}" for name in ("hidden", "cell"))
    return f"sequence_batching {{ {oldest} state [{blocks}] }}"


def write(repository: Path, way: str, sequences: int) -> None:
    """Write a model; all have the same weights."""
    backend = "other" if way == _OTHER else "this"
    config = _CONFIG.format(backend=backend, width=_WIDTH, scheduler=scheduler(way, sequences))
    version = harness.write_model(repository / way, config, {"model.py": _MODULE})
    state = {f"cell.{name}": value for name, value in _cell().state_dict().items()}
    safetensors.torch.save_file(state, version / "model.safetensors")


def _cell() -> nn.LSTMCell:
    torch.manual_seed(0)
    return nn.LSTMCell(_WIDTH, _WIDTH)


def inputs(sequences: int, steps: int) -> NDArray[np.float32]:
    """Return the inputs, [sequences, steps, width]; the same each time."""
    random = np.random.default_rng(0)
    return random.standard_normal((sequences, steps, _WIDTH), dtype=np.float32)


def eager(sent: NDArray[np.float32], *, stateful: bool) -> NDArray[np.float32]:
    """Return the outputs of PyTorch."""
    cell, outputs = _cell(), []
    state: tuple[Tensor, Tensor] | None = None
    with torch.inference_mode():
        for number in range(sent.shape[1]):
            new: tuple[Tensor, Tensor] = cell(torch.from_numpy(sent[:, number]), state)
            state = new if stateful else None
            outputs.append(new[0].numpy())
    return np.stack(outputs, axis=1)


async def send_all(address: str, model: str, sent: NDArray[np.float32]) -> Turn:
    """Send all steps of all sequences; raise if a request fails."""
    values = np.empty_like(sent)
    before = _statistics(address, model)
    started = time.perf_counter()
    shares = np.array_split(np.arange(len(sent)), _CONNECTIONS)
    await asyncio.wait_for(
        asyncio.gather(*(_send(address, model, sent, values, share) for share in shares)),
        _LONGEST_S,
    )
    seconds = time.perf_counter() - started
    done = load_generator.server_work(before, _statistics(address, model))
    inside = sum(done.stages[stage] for stage in done.stages if stage != "queue")
    batch = done.rows / done.calls
    return Turn(seconds, batch, inside / batch, values)


def _statistics(address: str, model: str) -> dict[str, object]:
    with tritonclient.grpc.InferenceServerClient(address) as client:
        statistics: dict[str, object] = client.get_inference_statistics(model, as_json=True)
        return statistics


async def _send(
    address: str,
    model: str,
    sent: NDArray[np.float32],
    values: NDArray[np.float32],
    share: NDArray[np.int64],
) -> None:
    """Sequences of one connection: a call for each step."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        async def sequence(place: int) -> None:
            for number in range(sent.shape[1]):
                answer = await stub.ModelInfer(_request(model, sent, place, number))
                (content,) = answer.raw_output_contents
                values[place, number] = np.frombuffer(content, dtype=np.float32)

        await asyncio.gather(*map(sequence, share.tolist()))


def _request(
    model: str, sent: NDArray[np.float32], place: int, number: int
) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    if model != _STATELESS:
        request.parameters["sequence_id"].int64_param = place + 1
        request.parameters["sequence_start"].bool_param = number == 0
        request.parameters["sequence_end"].bool_param = number + 1 == sent.shape[1]
    request.inputs.add(name="x", datatype="FP32", shape=[1, _WIDTH])
    request.raw_input_contents.append(sent[place, number].tobytes())
    return request


def main(words: list[str]) -> None:
    """Compare values, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout")
    settings = parser.parse_args(words)
    sent = inputs(settings.sequences, settings.steps)
    models, checkouts = [_STATEFUL, _SCHEDULED, _STATELESS], {"this": stubs.ROOT}
    if settings.against is not None:
        models.append(_OTHER)
        checkouts["other"] = settings.against.absolute()
    with harness.scratch() as scratch:
        repository = Path(scratch) / "repository"
        for way in models:
            write(repository, way, settings.sequences)
        with stubs.served(repository, checkouts) as server:

            def send(model: str) -> Turn:
                return asyncio.run(send_all(server.grpc, model, sent))

            for model in models:
                expected = eager(sent, stateful=model in (_STATEFUL, _OTHER))
                np.testing.assert_allclose(send(model).values, expected, rtol=1e-4, atol=1e-5)
            turns = [[send(model) for model in models] for _ in range(settings.pairs)]
    print(f"{settings.sequences} sequences of {settings.steps} steps, LSTM of {_WIDTH}")
    print(f"torch {torch.__version__}\n")
    count = settings.sequences * settings.steps
    stateful, scheduled, stateless, *others = zip(*turns, strict=True)
    rows = [
        (
            model,
            f"{count / spread([turn.seconds for turn in measured]).median:,.0f}",
            f"{spread([turn.batch for turn in measured]).median:.1f}",
            f"{1e6 * spread([turn.inside for turn in measured]).median:.1f}",
            _ratio(measured, scheduled) if measured is stateful else "",
            _ratio(measured, stateless) if measured is not stateless else "",
            *(_ratio(measured, other) if measured is stateful else "" for other in others),
        )
        for model, measured in zip(models, (stateful, scheduled, stateless, *others), strict=True)
    ]
    print(markdown(_COLUMNS[: 6 + len(others)], rows))


def _ratio(turns: Sequence[Turn], others: Sequence[Turn]) -> str:
    """Return the times of turns as multiples of those beside them."""
    pairs = zip(turns, others, strict=True)
    return spread([turn.seconds / other.seconds for turn, other in pairs]).text(2)


if __name__ == "__main__":
    main(sys.argv[1:])
