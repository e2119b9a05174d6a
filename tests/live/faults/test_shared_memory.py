"""A server whose shared memory is too small for a request: that one fails, the others do not."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import models
import numpy as np
import pytest
import scenarios
import supervised
import tritonclient.grpc
from scenarios import Scenario
from serving import infer_inputs
from supervised import Steady, Supervised, until
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.slow

_SMALL = "mount -t tmpfs -o size=24m tmpfs /dev/shm"
_LARGE = 32 << 20


def _may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-m", "sh", "-c", _SMALL], check=False).returncode == 0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Supervised]:
    if not _may_mount():
        pytest.skip("a small /dev/shm of its own needs the right to mount one (root)")
    table = (
        Scenario("steady", scenarios.python(models.Negate), scenarios.x_to_y(4)),
        Scenario(
            "large", scenarios.python(models.Negate), scenarios.config({"x": [-1]}, {"y": [-1]})
        ),
    )
    for one in table:
        one.lay_out(tmp_path / "repository")
    wrapped = ("unshare", "-m", "sh", "-c", f'{_SMALL} && exec "$@"', "sh")
    with supervised.serve(tmp_path / "repository", within=wrapped) as running:
        running.wait_loaded()
        yield running


def _ask(served: Supervised, values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    inputs = infer_inputs(tritonclient.grpc, {"x": np.ones((1, values), np.float32)})
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        answer: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = client.infer(
            "large", inputs, client_timeout=120
        ).as_numpy("y")
        return answer


def test_a_request_that_does_not_fit(served: Supervised) -> None:
    """It gets an error, another model answers meanwhile, and the next request is right."""
    assert (_ask(served, 4) == -1).all()
    steady = Steady(served, "steady")
    for _ in range(2):
        with pytest.raises(InferenceServerException):
            _ask(served, _LARGE // 4)
        until(lambda: served.ready("large"), served)
        assert (_ask(served, 1000) == -1).all()
    steady.end()
    assert steady.answers
    assert not steady.failures
