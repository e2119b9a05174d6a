"""`torch-py-backend bench` on a real server: counts and fields, never times."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import living
import models
import numpy as np
import psutil
import pytest
import safetensors.numpy
import scenarios
import serving
from scenarios import Scenario

from torch_py_backend.server import Server
from torch_py_backend.tools.load_generator import STAGES

_BENCH = "from torch_py_backend.cli import app; app()"
_SHORT = ("--duration=0.3", "--warmup=0.1")
_RAISES = """
def raises(x):
    raise ValueError("never")
"""
_RAISED = "requests failed; the first: model 'raises': raises() raised ValueError: never"
_UNKNOWN = "no model 'nothing'; its models: broken, example, negate, raises, single."


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", _BENCH, "bench", *arguments]


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(*arguments), capture_output=True, text=True, check=False, timeout=500
    )


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that negates, one that fails, one that does not load, one with an example."""
    folder = tmp_path_factory.mktemp("bench") / "repository"
    batched = scenarios.x_to_y(WARMUP="false")
    unbatched = scenarios.config({"x": [4]}, {"y": [4]}, max_batch_size=0)
    negate = scenarios.python(models.Negate)
    for scenario in (
        Scenario("negate", negate, batched),
        Scenario("single", negate, unbatched),
        Scenario("raises", scenarios.text(_RAISES), batched),
        Scenario("broken", scenarios.text("def"), batched),
        Scenario("example", negate, batched),
    ):
        scenario.lay_out(folder)
    example = {"x": np.ones((3, 4), dtype=np.float32)}
    safetensors.numpy.save_file(example, folder / "example/1/example_inputs.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with serving.running(repository.parent, ready=False) as server:
        yield server


def _url(server: Server, protocol: str) -> str:
    host = server.http_address if protocol == "http" else server.grpc_address
    return f"{protocol}://{host}"


def _document(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_counts_agree_with_triton(protocol: str, server: Server) -> None:
    """Triton saw exactly the requests that were measured, and the rows in them."""
    url = _url(server, protocol)
    document = _document(
        _bench(url, "negate", "--concurrency=1,3", "--rows=2", "--json=-", *_SHORT)
    )
    assert document["server"] == url
    assert (document["inputs"], document["rows_per_request"]) == ("made up", 2)
    assert [point["concurrency"] for point in document["points"]] == [1, 3]
    for point in document["points"]:
        triton = point["triton"]
        assert point["answered"] == triton["requests"] > 0
        assert (point["failed"], point["unanswered"], triton["failures"]) == (0, 0, 0)
        rows = sum(int(size) * count for size, count in triton["batches"].items())
        assert rows == 2 * point["answered"]
        assert sum(triton["batches"].values()) == triton["calls"]
        assert set(triton["per_request_ms"]) == set(STAGES)
        assert point["latency_ms"]["p50"] <= point["latency_ms"]["max"]


def test_a_model_without_a_batch_dimension(server: Server) -> None:
    """Requests are sent as the config says, and count as one row."""
    done = _bench(_url(server, "http"), "single", "--concurrency=1", "--json=-", *_SHORT)
    (point,) = _document(done)["points"]
    assert point["triton"]["batches"] == {"1": point["answered"]}


def test_a_file_of_inputs(server: Server, tmp_path: Path) -> None:
    """The rows of a file are sent, so many to a request."""
    path = tmp_path / "inputs.json"
    tensor = {"name": "x", "shape": [2, 4], "datatype": "FP32", "data": list(range(8))}
    path.write_text(json.dumps({"inputs": [tensor]}))
    url = _url(server, "grpc")
    done = _bench(
        url, "negate", "--concurrency=1", f"--inputs={path}", "--rows=2", "--json=-", *_SHORT
    )
    document = _document(done)
    assert document["inputs"] == str(path)
    assert list(document["points"][0]["triton"]["batches"]) == ["2"]


def test_a_repository(repository: Path, tmp_path: Path) -> None:
    """A server is started and stopped; the model's example is sent; the JSON is written."""
    done = _bench(
        str(repository), "example", "--concurrency=1,2", *_SHORT,
        f"--json={tmp_path / 'a.json'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "example on grpc://127.0.0.1:" in done.stdout
    assert "3 rows in a request" in done.stdout
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["inputs"] == str(repository / "example" / "1" / "example_inputs.safetensors")
    assert len(document["points"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("protocol", "model", "message"),
    [
        ("grpc", "raises", _RAISED),
        ("http", "broken", "model 'broken' is not ready on the server: "),
        ("grpc", "nothing", _UNKNOWN),
        ("", "broken", "model 'broken' is not ready on the server: "),
        ("", "nothing", _UNKNOWN),
    ],
)
def test_models_that_cannot_be_measured(
    protocol: str, model: str, message: str, server: Server, repository: Path, tmp_path: Path
) -> None:
    """One sentence, exit code 1, and no file; on a running server and on one of our own."""
    where = _url(server, protocol) if protocol else str(repository)
    done = _bench(where, model, f"--json={tmp_path / 'a.json'}", *_SHORT)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_signal_keeps_what_was_measured(repository: Path, tmp_path: Path) -> None:
    """Stopping early prints and writes the points so far, and leaves no server behind."""
    process = subprocess.Popen(
        _command(
            str(repository), "negate", "--concurrency=1,2", "--duration=60", "--warmup=0",
            f"--json={tmp_path / 'a.json'}",
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "100"},
    )  # fmt: skip
    try:
        family = _when_loaded(process.pid)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=100)
        assert process.returncode == 1
        assert "negate on grpc://" in stdout
        assert "Interrupted" in stderr
        document = json.loads((tmp_path / "a.json").read_text())
        assert document["interrupted"] is True
        assert [point["concurrency"] for point in document["points"]] == [1]
        assert living.all_end(family)
    finally:
        process.kill()


def _when_loaded(pid: int) -> list[psutil.Process]:
    """The processes of the server, once a request to `negate` has been answered."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        time.sleep(0.1)
        family = living.descendants(pid)
        words = " ".join(map(living.command, family))
        with contextlib.suppress(OSError):  # it does not listen yet
            if any(map(_answered, re.findall(r"--http-port=(\d+)", words))):
                return family
    raise AssertionError("the load did not begin")


def _answered(port: str) -> int:
    url = f"http://127.0.0.1:{port}/v2/models/negate/stats"
    with urllib.request.urlopen(url, timeout=60) as page:
        return int(json.load(page)["model_stats"][0]["inference_count"])
