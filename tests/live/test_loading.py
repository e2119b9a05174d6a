"""Models that start together on a real server: they load in turn, and unload without a trace."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import living
import models
import psutil
import pytest
import scenarios
import serving
import tritonclient.http
from torch import Tensor, nn

# Writes down how many are loading while it does.
_COUNTING = """
import os
import re
import time
from pathlib import Path

_present = Path(__file__).parents[2] / "present"
_own = _present / str(os.getpid())
_own.touch()
time.sleep(0.05)
with (_present.parent / "counts").open("a") as file:
    file.write(f"{len(list(_present.iterdir()))}\\n")
_own.unlink()


"""


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_load_in_turn_and_unload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances of one model load one by one; nothing of them remains after they unload."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    repository = tmp_path / "repository"
    for name, count in (("first", 2), ("second", 1)):
        scenarios.Scenario(
            name,
            scenarios.text(_COUNTING + models.source(Doubled)),
            scenarios.config(
                {"x": [4]},
                {"y": [4]},
                parameters={"MODEL_CLASS": "Doubled"},
                more=f"instance_group [{{ kind: KIND_CPU count: {count} }}]\n",
            ),
        ).lay_out(repository)
    (repository / "present").mkdir()
    with serving.running(tmp_path, "--model-control-mode=explicit") as server:
        client = tritonclient.http.InferenceServerClient(server.http_address, network_timeout=500)
        process = psutil.Process(server.process.pid)
        # Under the prefix that it was given: other servers may run here.
        told = re.search(r"shm-region-prefix-name=(\S+)", living.command(process))
        assert told is not None
        shared = _shared(told[1])
        for _ in range(2):
            for name in ("first", "second"):
                client.load_model(name)
            assert client.is_model_ready("second")
            for name in ("first", "second"):
                client.unload_model(name)
            # Triton reaps a process before it gives back what they shared.
            while living.descendants(process.pid) or _shared(told[1]) != shared:
                time.sleep(0.05)
            assert not any((temporary / f"torch-py-backend-{os.geteuid()}" / "servers").iterdir())
        client.close()
    assert (repository / "counts").read_text().split() == ["1"] * 6


def _shared(prefix: str) -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"{prefix}*")}
