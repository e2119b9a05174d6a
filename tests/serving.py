"""A running server with models of scenarios, and its clients."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hooked
import kinds
import ml_dtypes
import pytest
import registered
import scenarios
import torch
import tritonclient.grpc
import tritonclient.http
from scenarios import Call, Refused, assert_close
from supervised import EXIT
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from torch_py_backend.errors import ToolError
from torch_py_backend.processes import instance_status
from torch_py_backend.processes.instance_status import InstanceState
from torch_py_backend.server.client import ModelState
from torch_py_backend.server.tritonserver import Server

_LONGEST_S = 540
# For so long Triton does not leave instances idle that it has not forgotten.
_FORGOTTEN_S = 30
# What Triton dies of where an instance did not answer in time.
_STALLED = "boost::interprocess::lock_exception"
# A port that is free here may be the one that a server of another process will have in a moment.
_ADDRESS = f"127.0.0.{2 + int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0').removeprefix('gw'))}"
_GRPC = {
    400: "INVALID_ARGUMENT",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}
# Of each kind of model, request and refusal one: what a server and its clients add to the fake.
# Programs and packages are in test_digits.py, models without batches in test_repositories.py.
_ON_SERVER = {
    "requests": (
        "outputs", "prints_beyond_ascii", "every_type", "optional_inputs", "bytes_in_rows",
        "compiled", "padded", "poison", "outputs_in_memory_used_again", "batch_output",
    ),
    "sequences, hooks, completed and refused models": (
        "state_direct", "state_oldest", "states_of_strings_and_files", "signals_uint64_direct",
        "hooks_counts", "operator_of_torchscript", "complete_export_nested", "complete_crashes",
        "syntax_error",
    ),
}  # fmt: skip
_ALL = (*scenarios.TABLE, *kinds.TABLE, *hooked.TABLE, *registered.TABLE)
_BY_NAME = {scenario.name: scenario for scenario in _ALL}
# What one server serves together: all at once would not fit a small machine's memory.
TABLES = {
    name: tuple(_BY_NAME[scenario] for scenario in names) for name, names in _ON_SERVER.items()
}


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

    def until_logged(self, part: str) -> None:
        """Wait for a part of the log: Triton writes it after a request has its answer."""
        until(lambda: part in self.log)

    def check(self, protocol: str, name: str, call: Call) -> None:
        """One request over `http` or `grpc` has the answer, or the refusal, that the table has."""
        module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
        send = getattr(self, protocol).infer
        inputs = infer_inputs(module, call.inputs)
        if isinstance(call.expected, Refused):
            with pytest.raises(InferenceServerException) as refusal:
                send(name, inputs, **_options(call))
            _check_refusal(refusal.value, call.expected, protocol)
            return
        outputs = [module.InferRequestedOutput(output) for output in call.expected]
        check_result(send(name, inputs, outputs=outputs, **_options(call)), call.expected)

    def check_together(self, name: str, batch: Sequence[Call]) -> None:
        check_together(self.grpc, name, batch)


def until(happened: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def running(folder: Path, *arguments: str, ready: bool = True) -> Iterator[Server]:
    """A server that has tried to load every model in `repository`; if `ready`, with success."""
    log_path = folder / "server.log"
    with contextlib.ExitStack() as stack:
        server, states = _loaded(stack, folder / "repository", log_path, arguments)
        refused = [one for one in states.values() if one.reason]
        assert not (ready and refused), (refused, log_path.read_text(errors="replace"))
        # Triton begins to listen for them after it has begun for requests.
        until(lambda: _listens(server.metrics_address))
        yield server


def _loaded(
    stack: contextlib.ExitStack, repository: Path, log_path: Path, arguments: Sequence[str]
) -> tuple[Server, Mapping[str, ModelState]]:
    """Return a server and the states of its models.

    Triton 24.10 never ends a load during which the machine stalled for a second, or dies of it.
    `serve` notices; here, the server is replaced.
    """
    deadline = time.monotonic() + _LONGEST_S
    while True:
        with contextlib.ExitStack() as attempt:
            options = (EXIT, "--exit-on-error=false", *arguments)
            server = attempt.enter_context(
                Server(repository, address=_ADDRESS, arguments=options, log=log_path)
            )
            try:
                if states := server.wait_loaded(functools.partial(_has_forgotten, server)):
                    stack.push(attempt.pop_all())
                    return server, states
            except ToolError:
                if _STALLED not in log_path.read_text(errors="replace"):
                    raise
            assert time.monotonic() < deadline
        log_path.rename(log_path.with_suffix(".forgotten"))


def _has_forgotten(server: Server) -> bool:
    """Whether the server waits for the end of loads that have all ended."""
    statuses = []
    with contextlib.suppress(OSError, ValueError):  # an instance has just ended
        paths = instance_status.files(server.status_folder)
        statuses = [instance_status.Reader(path).read() for path in paths]
    return bool(statuses) and all(
        status.state is InstanceState.IDLE and time.monotonic() > status.since + _FORGOTTEN_S
        for status in statuses
    )


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


def _options(call: Call) -> dict[str, Any]:
    options: dict[str, Any] = {"parameters": call.parameters or None}
    if call.turn is not None:
        options["sequence_id"], options["sequence_start"], options["sequence_end"] = call.turn
    return options


def _check_refusal(error: InferenceServerException, expected: Refused, protocol: str) -> None:
    expected.check(error.message())
    status = str(expected.status) if protocol == "http" else _GRPC[expected.status]
    assert status in error.status()


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
            _check_refusal(error, call.expected, "grpc")
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


def to_numpy(value: Any) -> Any:
    """Torch tensors stand for BF16, which clients hold in the type of ml_dtypes."""
    if isinstance(value, torch.Tensor):
        return value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return value
