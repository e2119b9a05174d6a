"""The README's first model, built from its code blocks and served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import readme
import safetensors.torch

from torch_py_backend.server import Server


def test_first_model(tmp_path: Path) -> None:
    """Files, weights and client as they stand in the README give the linear layer's answer."""
    folder = tmp_path / "model_repository" / "regression"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(
        readme.block_after("`model_repository/regression/1/model.py`")
    )
    (folder / "config.pbtxt").write_text(
        readme.block_after("`model_repository/regression/config.pbtxt`")
    )
    _run(readme.block_after("The weights, saved once"), tmp_path)
    with (
        (tmp_path / "server.log").open("wb") as log,
        Server(
            tmp_path / "model_repository", http_port=0, grpc_port=0, metrics_port=0, log=log
        ) as server,
    ):
        (state,) = server.wait_loaded(timeout=120)
        assert state.ready, state.reason
        client = readme.block_after("a client asks for it").replace(
            "localhost:8001", server.grpc_address
        )
        printed = _run(client, tmp_path)
    weights = safetensors.torch.load_file(folder / "1" / "model.safetensors")
    expected = float(weights["linear.weight"].sum() + weights["linear.bias"])
    values = [float(value) for value in printed.replace("[", "").replace("]", "").split()]
    assert len(values) == 2
    assert all(abs(value - expected) < 1e-4 for value in values)


def _run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
