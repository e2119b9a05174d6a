"""A running server with models of scenarios, and its clients."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import kinds
import ml_dtypes
import numpy as np
import pytest
import scenarios
import torch
import tritonclient.grpc
import tritonclient.http
from children import until
from scenarios import Call, Refused, assert_close
from tritonclient.utils import (
    InferenceServerException,
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    triton_to_np_dtype,
)

from torch_py_backend.server import serving as supervision
from torch_py_backend.server.client import ModelState
from torch_py_backend.server.tritonserver import Server

_LONGEST_S = 540
# How long Triton waits for open connections, and for instances that do not answer.
EXIT = "--exit-timeout-secs=5"
# A port that is free here may be the one that a server of another process will have in a moment.
_ADDRESS = f"127.0.0.{2 + int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0').removeprefix('gw'))}"
_GRPC = {
    400: "INVALID_ARGUMENT",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}
# Of each kind of model, request and refusal one: what a server and its clients add to the fake.
# Programs are in the pages that tests/deploy follows; strings in faults/test_requests.py;
# TorchScript and models without batches in repositories.py; hooks in composed.py; and other
# sequences in test_streaming.py.
_ON_SERVER = (
    "outputs", "prints_beyond_ascii", "every_type", "optional_inputs", "compiled", "padded",
    "poison", "outputs_in_memory_used_again", "batch_output", "states_of_strings_and_files",
    "signals_uint64_direct", "complete_aoti", "complete_crashes",
)  # fmt: skip
_BY_NAME = {scenario.name: scenario for scenario in (*scenarios.TABLE, *kinds.TABLE)}
TABLE = tuple(_BY_NAME[name] for name in _ON_SERVER)


@dataclass(frozen=True)
class Serving:
    server: Server
    states: Mapping[str, ModelState]
    http: tritonclient.http.InferenceServerClient
    grpc: tritonclient.grpc.InferenceServerClient
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def metrics(self) -> str:
        return metrics(self.server.metrics_address)


@contextlib.contextmanager
def running(folder: Path, *arguments: str, ready: bool = True) -> Iterator[Server]:
    """A supervised server that has tried to load every model in `repository`.

    If `ready`, with success. A load that Triton gives up, as when the machine stalled for a second,
    is repeated.
    """
    log = folder / "server.log"
    server = Server(folder / "repository", address=_ADDRESS, arguments=(EXIT, *arguments), log=log)
    names, over = supervision.take_names(server), threading.Event()
    loaded: Future[Mapping[str, str]] = Future()

    def run() -> None:
        try:
            supervision.run(server, names, lambda _: None, loaded.set_result, over.is_set)
        except Exception as error:
            if not loaded.done():
                loaded.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        reasons = loaded.result(_LONGEST_S)
        refused = {name: reason for name, reason in reasons.items() if reason}
        assert not (ready and refused), (refused, log.read_text(errors="replace"))
        # Triton begins to listen for them after it has begun for requests.
        until(lambda: _listens(server.metrics_address))
        yield server
    finally:
        over.set()
        thread.join()


def _listens(address: str) -> bool:
    host, port = address.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=60):
        return True
    return False


@contextlib.contextmanager
def asked(folder: Path, *arguments: str) -> Iterator[Serving]:
    """Such a server, some of whose models may have been refused, with its clients."""
    with running(folder, *arguments, ready=False) as server:
        states = server.client.models()
        http = tritonclient.http.InferenceServerClient(server.http_address)
        grpc = tritonclient.grpc.InferenceServerClient(server.grpc_address)
        yield Serving(server, states, http, grpc, folder / "server.log")
        http.close()
        grpc.close()


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def metrics(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def samples(page: str) -> list[Sample]:
    """Every sample of a page of metrics, once."""
    found = []
    for line in page.splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            assert match is not None, line
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            found.append(Sample(match[1], labels, float(match[3])))
    keys = [(sample.name, *sorted(sample.labels.items())) for sample in found]
    assert len(set(keys)) == len(keys)
    return found


def _options(call: Call) -> dict[str, Any]:
    options: dict[str, Any] = {"parameters": call.parameters or None}
    if call.turn is not None:
        options["sequence_id"], options["sequence_start"], options["sequence_end"] = call.turn
    return options


def _check_refusal(
    error: InferenceServerException, expected: Refused, *, is_http: bool = False
) -> None:
    expected.check(error.message())
    status = str(expected.status) if is_http else _GRPC[expected.status]
    assert status in error.status()


def check(client: Any, name: str, call: Call) -> None:
    """One request over HTTP or gRPC has the answer, or the refusal, that the table has."""
    is_http = isinstance(client, tritonclient.http.InferenceServerClient)
    module = tritonclient.http if is_http else tritonclient.grpc
    inputs = infer_inputs(module, call.inputs)
    if isinstance(call.expected, Refused):
        with pytest.raises(InferenceServerException) as refusal:
            client.infer(name, inputs, **_options(call))
        _check_refusal(refusal.value, call.expected, is_http=is_http)
        return
    outputs = [module.InferRequestedOutput(output) for output in call.expected]
    check_result(client.infer(name, inputs, outputs=outputs, **_options(call)), call.expected)


def check_together(
    client: tritonclient.grpc.InferenceServerClient, name: str, batch: Sequence[Call]
) -> None:
    """Requests that are sent at once, each with an id: each has what the table has for it."""
    answers: list[queue.SimpleQueue[tuple[Any, Any]]] = []
    for place, call in enumerate(batch):
        answers.append(queue.SimpleQueue())
        client.async_infer(
            name,
            infer_inputs(tritonclient.grpc, call.inputs),
            lambda result, error, answer=answers[-1]: answer.put((result, error)),
            request_id=f"{name}-{place}",
            **_options(call),
        )
    for call, answer in zip(batch, answers, strict=True):
        result, error = answer.get(timeout=120)
        if isinstance(call.expected, Refused):
            assert error is not None
            _check_refusal(error, call.expected)
        else:
            assert error is None, error
            check_result(result, call.expected)


def check_result(result: Any, expected: dict[str, Any]) -> None:
    for output, value in expected.items():
        array, wanted = result.as_numpy(output), to_numpy(value)
        assert array.dtype == wanted.dtype
        assert array.shape == wanted.shape
        assert_close(array, wanted)


def infer_inputs(module: Any, inputs: Mapping[str, Any]) -> list[Any]:
    """Return arrays as the inputs of tritonclient.http or tritonclient.grpc."""
    sent = []
    for key, value in inputs.items():
        array = to_numpy(value)
        tensor = module.InferInput(key, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        sent.append(tensor)
    return sent


def sent_array(sent: tritonclient.grpc.InferInput) -> Any:
    """Return what an input of tritonclient.grpc holds."""
    content, kind = sent._get_content(), sent.datatype()
    if kind == "BYTES":
        return deserialize_bytes_tensor(content).reshape(sent.shape())
    return np.frombuffer(content, triton_to_np_dtype(kind)).reshape(sent.shape())


def to_numpy(value: Any) -> Any:
    """Torch tensors stand for BF16, which clients hold in the type of ml_dtypes."""
    if isinstance(value, torch.Tensor):
        return value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return value
