"""Bad requests beside good ones: no crash, no hang, no error of ours but the client's.

Triton's own parser refuses most of the malformed; the others are those that reach a model.
docs/security.md lists requests at which tritonserver 24.10 itself dies; they are not here.
"""

from __future__ import annotations

import http.client
import json
import queue
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import grpc
import models
import numpy as np
import pytest
import scenarios
import serving
import supervised
import torch
import tritonclient.grpc
from instances import named
from moto.server import ThreadedMotoServer
from supervised import Supervised
from tritonclient.grpc import service_pb2, service_pb2_grpc

from torch_py_backend.processes.instance_status import InstanceState

pytestmark = pytest.mark.slow

_PAIRS: scenarios.Specs = {name: ["STRING", 2] for name in ("blobs", "words")}
_SENT: scenarios.Arrays = {name: scenarios.strings([b"a", b"b"], [b"", b"c"]) for name in _PAIRS}
_GOOD_MODELS = (
    named("function"),
    scenarios.Scenario(
        "pairs",
        scenarios.python(models.echo),
        scenarios.config(_PAIRS, _PAIRS),
        (scenarios.Call(_SENT, _SENT),),
    ),
)
_STORE = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}
_PATH = "/v2/models/function/infer"
_TIMEOUT_S = 60
# Triton itself refuses a whole batch in which the lengths of one request's strings are wrong.
_STRINGS = "strings of wrong lengths"
_LARGE = "more than /dev/shm holds"
_SMALL = "mount -t tmpfs -o size=24m tmpfs /dev/shm"
_FAULTS = {500, 502, 503, "INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS"}
# What a message of our making has, or one of something that went wrong in our process.
_OURS = ("model '", "Traceback", ".py", "Stub process", "Error:", "/tmp")


class Counts(torch.nn.Module):
    """Takes as many seconds as its values say; the answer is the count of rows that took time."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import time

        if bool((x > 0).any()):
            self.rows += x.shape[0]
            time.sleep(float(x.max()))
        return torch.full_like(x, self.rows)


_MAY_MOUNT = (
    shutil.which("unshare") is not None
    and subprocess.run(["unshare", "-m", "sh", "-c", _SMALL], check=False).returncode == 0
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    """A server of models in an object store that is away once they are loaded.

    It has a small /dev/shm of its own, if the user may mount one (root).
    """
    folder = tmp_path_factory.mktemp("requests")
    counts = scenarios.x_to_y(4, WARMUP="false")
    table = [scenarios.Scenario("counts", scenarios.python(Counts), counts)]
    for one in [*table, *_GOOD_MODELS]:
        one.lay_out(folder / "models")
    within = ("unshare", "-m", "sh", "-c", f'{_SMALL} && exec "$@"', "sh") if _MAY_MOUNT else ()
    store = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    store.start()
    variables = {**_STORE, "AWS_ENDPOINT_URL": "http://{}:{}".format(*store.get_host_and_port())}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        files.mkdir("bucket")
        files.put(str(folder / "models"), "bucket/models", recursive=True)
    url, cache = "s3://bucket/models", f"--cache={folder / 'cache'}"
    with supervised.serve(url, cache, within=within, **variables) as running:
        running.wait_loaded()
        store.stop()
        assert _STORE["AWS_SECRET_ACCESS_KEY"] not in running.log
        yield running


def _post(document: Any, tail: bytes = b"", path: str = _PATH, **headers: Any) -> bytes:
    """Return an HTTP request; `headers` come instead of those that would be right."""
    head = document if isinstance(document, bytes) else json.dumps(document).encode()
    right = {
        "Host": "localhost",
        "Inference_Header_Content_Length": len(head),
        "Content_Length": len(head) + len(tail),
    }
    lines = [f"{key.replace('_', '-')}: {value}" for key, value in {**right, **headers}.items()]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + head + tail


_INPUT = {"name": "x", "datatype": "FP32", "shape": [1, 4]}
_GOOD = {"inputs": [{**_INPUT, "data": [1.0, 2.0, 3.0, 4.0]}]}
_BYTES = np.ones((1, 4), np.float32).tobytes()
_BINARY = {"inputs": [{**_INPUT, "parameters": {"binary_data_size": len(_BYTES)}}]}
_WORDS = [{"name": one, "datatype": "BYTES", "shape": [1, 2], "data": ["?"] * 2} for one in _PAIRS]


def _input(**values: Any) -> bytes:
    """Return a request whose input has other values than a good one."""
    return _post({"inputs": [{**_GOOD["inputs"][0], **values}]})


_HTTP: dict[str, bytes] = {
    "another type": _input(datatype="INT64"),
    "no rows": _input(shape=[0, 4], data=[]),
    "an ID and texts that are not UTF-8": _post(
        json.dumps({"id": "?", "inputs": _WORDS}).encode().replace(b"?", b"\xff"),
        path="/v2/models/pairs/infer",
    ),
    "a negative size": _input(shape=[-1, 4]),
    "unknown shared memory": _input(
        parameters={"shared_memory_region": "/dev/mem", "shared_memory_byte_size": 16}
    ),
    "fewer bytes than announced": _post(_BINARY, _BYTES, Content_Length=10**6),
    "an unknown model": _post(_GOOD, path="/v2/models/../../etc/passwd/infer"),
}


def _message(**fields: Any) -> service_pb2.ModelInferRequest:
    """Return a gRPC request whose fields differ from a good one's."""
    good = {"model_name": "function", "inputs": [_INPUT], "raw_input_contents": [_BYTES]}
    return service_pb2.ModelInferRequest(**{**good, **fields})


def _strings(contents: bytes) -> service_pb2.ModelInferRequest:
    """Return a gRPC request with the same bytes for each of its inputs of two strings."""
    return _message(
        model_name="pairs",
        inputs=[{"name": name, "datatype": "BYTES", "shape": [1, 2]} for name in _PAIRS],
        raw_input_contents=[contents] * 2,
    )


_GRPC = {
    "another shape": _message(inputs=[{**_INPUT, "shape": [1, 5]}]),
    "contents twice": _message(inputs=[{**_INPUT, "contents": {"int_contents": [1]}}]),
    "more bytes than the shape": _message(raw_input_contents=[_BYTES + b"\0"]),
    _STRINGS: _strings(b"\xff" * 10),
}
_SHARED_MEMORY = {_LARGE: _strings(((12 << 20).to_bytes(4, "little") + bytes(12 << 20)) * 2)}
_ROOT = pytest.mark.skipif(not _MAY_MOUNT, reason="the right to mount a small /dev/shm (root)")


def _over_http(served: Supervised, request: bytes, *, ends: bool) -> tuple[int, str]:
    """Return the status and the text of the answer; 0: the connection was closed instead."""
    host, _, port = served.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as connection:
        connection.sendall(request)
        if ends:  # however many bytes were announced
            connection.shutdown(socket.SHUT_WR)
        response = http.client.HTTPResponse(connection)
        try:
            response.begin()
            return response.status, response.read().decode(errors="replace")
        except (ConnectionError, http.client.HTTPException):
            return 0, ""


def _over_grpc(served: Supervised, request: service_pb2.ModelInferRequest) -> tuple[str, str]:
    with grpc.insecure_channel(served.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            stub.ModelInfer(request, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code().name, error.details()
    return "OK", ""


def _send_good_requests(client: tritonclient.grpc.InferenceServerClient) -> None:
    for one in _GOOD_MODELS:
        serving.check_together(client, one.name, [*one.calls] * 4)


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param(_HTTP, id="http"),
        pytest.param(_GRPC, id="grpc"),
        pytest.param(_SHARED_MEMORY, id="shared memory", marks=_ROOT),
    ],
)
def test_bad_requests_are_refused_alone_and_every_process_lives_on(
    requests: dict[str, Any], served: Supervised
) -> None:
    started = {process.pid for process in served.family()}
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        for what, request in requests.items():
            with ThreadPoolExecutor(1) as beside:
                good = None if what == _STRINGS else beside.submit(_send_good_requests, client)
                if isinstance(request, bytes):
                    answer: Any = _over_http(served, request, ends=what.endswith("announced"))
                else:
                    answer = _over_grpc(served, request)
                if good is not None:
                    good.result()
            status, text = answer
            assert status not in (200, "OK", "DEADLINE_EXCEEDED"), what
            if what == _LARGE:
                assert "'--shm-size' flag" in text
            elif status in _FAULTS:
                assert not any(part in text for part in _OURS), (what, answer)
        _send_good_requests(client)
    assert started <= {process.pid for process in served.family()}


def test_cancelled_and_late_requests_are_not_run(served: Supervised) -> None:
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def send(seconds: float, **more: Any) -> Any:
            x = np.full((1, 4), seconds, dtype=np.float32)
            inputs = serving.infer_inputs(tritonclient.grpc, {"x": x})
            return client.async_infer(
                "counts", inputs, lambda result, error: answers.put((result, error)), **more
            )

        send(0.1)
        first, _ = answers.get(timeout=120)  # from now on the instance knows that it pays to ask
        send(5)
        served.until(lambda: served.in_state("counts", InstanceState.BUSY))
        calls = [send(0.1) for _ in range(3)]
        send(0.1, client_timeout=0.2)
        time.sleep(0.3)  # until it is past
        for call in calls:
            call.cancel()
        errors = [answers.get(timeout=120)[1] for _ in range(5)]
        assert errors.count(None) == 1
        send(0.1)
        last, _ = answers.get(timeout=120)
    assert (last.as_numpy("y") == first.as_numpy("y") + 2).all()
