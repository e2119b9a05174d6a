"""TENSOR_PARALLEL on a real server under `serve`: values, a killed worker, an unload."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import living
import numpy as np
import parallel
import psutil
import pytest
import tritonclient.grpc
from scenarios import Scenario, config
from supervised import Supervised, serve, until
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's file of weights, in its repository."""
    repository = tmp_path_factory.mktemp("parallel") / "repository"
    text = config(
        {"x": [4]}, {"y": [4]}, parameters={"TENSOR_PARALLEL": "2"}, more="dynamic_batching { }\n"
    )
    return Scenario("wide", parallel.write, text).lay_out(repository) / "1" / "model.pt"


@pytest.fixture(scope="module")
def served(weights: Path) -> Iterator[Supervised]:
    with serve(weights.parents[2]) as running:
        running.settle()
        yield running


def _workers(served: Supervised) -> list[psutil.Process]:
    return [one for stub in served.stubs("wide") for one in parallel.workers(stub.pid)]


def _ask(served: Supervised, x: Any) -> Any:
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        tensor = tritonclient.grpc.InferInput("x", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x)
        return client.infer("wide", [tensor], client_timeout=60).as_numpy("y")


def test_values(served: Supervised) -> None:
    """Batches of any size are answered as by one process."""
    assert len(_workers(served)) == 1
    for rows in range(1, 9):
        x = np.linspace(-1, 1, rows * 4, dtype=np.float32).reshape(rows, 4)
        np.testing.assert_allclose(_ask(served, x), parallel.expected(x), rtol=1e-5, atol=1e-6)


def test_a_request_that_all_refuse(served: Supervised) -> None:
    """It has the model's error, and the same processes answer the next one."""
    before = _workers(served)
    x = np.full((1, 4), 101, dtype=np.float32)
    with pytest.raises(InferenceServerException, match="ValueError: all refuse this"):
        _ask(served, x)
    np.testing.assert_allclose(_ask(served, x - 100), parallel.expected(x - 100), rtol=1e-5)
    assert _workers(served) == before


@pytest.mark.parametrize("called", [False, True], ids=["idle", "in a call"])
def test_a_worker_that_is_killed(served: Supervised, called: bool) -> None:
    """The instance is poisoned, and the model loaded again, with other processes."""
    (stub,), (worker,) = served.stubs("wide"), _workers(served)
    if called:
        with pytest.raises(InferenceServerException, match="met a fatal error") as refused:
            _ask(served, np.full((1, 4), 104, dtype=np.float32))
        assert "UNAVAILABLE" in refused.value.status()
    else:
        worker.send_signal(signal.SIGKILL)
    until(lambda: served.stubs("wide") not in ([], [stub]) and served.ready("wide"), served)
    x = np.ones((2, 4), dtype=np.float32)
    np.testing.assert_allclose(_ask(served, x), parallel.expected(x), rtol=1e-5)
    assert worker not in _workers(served)


def test_an_instance_that_is_killed(served: Supervised) -> None:
    """Its workers end with it, and the model is loaded again."""
    (stub,), (worker,) = served.stubs("wide"), _workers(served)
    stub.kill()
    until(lambda: living.ended(worker), served)
    until(lambda: served.stubs("wide") not in ([], [stub]) and served.ready("wide"), served)


def test_a_file_that_is_written_over(served: Supervised, weights: Path) -> None:
    """All processes go on with the weights that they have loaded."""
    x = np.ones((2, 4), dtype=np.float32)
    before = _ask(served, x)
    with weights.open("r+b") as file:
        size = len(file.read())
        file.seek(0)
        file.write(bytes(size))
    assert (_ask(served, x) == before).all()


def test_an_unload_leaves_nothing(served: Supervised) -> None:
    """The workers of a model that is unloaded are gone."""
    (worker,) = _workers(served)
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        client.unload_model("wide")
    until(lambda: living.ended(worker) and not served.stubs("wide"), served)
