"""docker/: the image's steps, run without a container engine, and its command.

The Dockerfile's COPY and RUN lines are carried out in a scratch tree that is laid out like NVIDIA's
image, with a fresh virtual environment in the role of the system's Python.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import packed
import pytest
import serving
import yaml
from children import until
from tritonclient import grpc

from torch_py_backend.server import installation, tritonserver
from torch_py_backend.server.tritonserver import choose_ports

_ROOT = Path(__file__).parents[2]
_COMPOSE = _ROOT / "docker" / "compose.yaml"
_EXAMPLES = _ROOT / "examples" / "model_repository"
_LONGEST_S = 300


def _steps() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, with comments dropped and continued lines joined."""
    text = (_ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(instruction, rest.strip()) for instruction, rest in pairs]


_STEPS = _steps()


def _texts(instruction: str) -> list[str]:
    return [text for name, text in _STEPS if name == instruction]


def _arguments() -> dict[str, str]:
    """Return the ARGs that have a default."""
    pairs = [text.partition("=") for text in _texts("ARG")]
    return {name: shlex.split(value)[0] for name, equals, value in pairs if equals}


def _service() -> dict[str, Any]:
    document = yaml.safe_load(_COMPOSE.read_text(encoding="utf-8"))
    (service,) = document["services"].values()
    return dict(service)


def test_arguments_are_declared() -> None:
    """An ARG before FROM is unknown after it: docker fills in nothing, silently."""
    known: set[str] = set()
    for instruction, text in _STEPS:
        assert set(re.findall(r"\$\{?(\w+)", text)) <= known
        if instruction == "FROM":
            known.clear()
        if instruction == "ARG":
            known.add(text.partition("=")[0])


def test_build_context() -> None:
    """It has what is copied, and nothing else; a change of our sources keeps torch's layer."""
    patterns = (_ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = {source for text in _texts("COPY") for source in text.split()[:-1]}
    assert {line[1:] for line in patterns if line.startswith("!")} == copied
    assert "*" in patterns
    order = [instruction for instruction, _ in _STEPS]
    assert order.index("RUN") < order.index("COPY")


def test_compose() -> None:
    """It builds the image, with the examples, enough shared memory, and time to stop."""
    service = _service()
    context = (_COMPOSE.parent / service["build"]["context"]).resolve()
    assert (context / service["build"]["dockerfile"]) == _ROOT / "docker" / "Dockerfile"
    assert service["shm_size"] == "1gb"
    grace = int(service["stop_grace_period"].removesuffix("s"))
    assert grace > tritonserver.EXIT_SECONDS + 2 * tritonserver._GRACE_SECONDS
    assert service["volumes"] == ["../examples/model_repository:/models:ro"]
    assert json.loads(_texts("CMD")[0])[:3] == ["torch-py-backend", "serve", "/models"]
    assert [port.split(":")[-1] for port in service["ports"]] == _texts("EXPOSE")[0].split()


@dataclass(frozen=True)
class Image:
    """A scratch tree in the role of the image's file system."""

    root: Path
    environment: dict[str, str]

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, cwd=self.root, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip


def _built(root: Path) -> Image:
    """The image after the Dockerfile's last step."""
    triton = installation.TritonInstallation()
    base = root / "opt" / "tritonserver"
    _lay_out_base(triton, base)
    python = packed.make(root / "python")
    values = {
        "PATH": os.pathsep.join([f"{python}/bin", f"{base}/bin", os.environ["PATH"]]),
        # Beside the server's own libraries the stub needs libpython.
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, [base / "lib", *triton.libraries[1:]])),
        # What the wheel is built with is there already.
        "PIP_NO_BUILD_ISOLATION": "0",
    }
    image = Image(root, {**os.environ, **_arguments(), **values})
    for instruction, text in _STEPS:
        placed = text.replace("/opt/", f"{root}/opt/")
        if instruction == "COPY":
            _copy(placed)
        if instruction == "RUN":
            done = image.run(["/bin/sh", "-c", placed])
            assert done.returncode == 0, f"{text}\n{done.stdout}"
            # pip's warning for an extra that is not in pyproject.toml.
            assert "does not provide the extra" not in done.stdout
    return image


def _lay_out_base(triton: installation.TritonInstallation, base: Path) -> None:
    """Lay out what NVIDIA's image has in /opt/tritonserver: bin, lib, and its Python backend."""
    python = base / "backends" / "python"
    shutil.copytree(triton.python_backend, python)
    shutil.copy2(triton.stub, python / triton.stub.name)
    for folder in ("bin", "lib"):
        (base / folder).mkdir()
    shutil.copy2(triton.executable, base / "bin" / "tritonserver")
    for library in triton.libraries[0].glob("*.so*"):
        (base / "lib" / library.name).symlink_to(library)


def _copy(text: str) -> None:
    """COPY as docker has it: files go into the last path, of a folder what it contains."""
    *sources, target = text.split()
    for source in (_ROOT / name for name in sources):
        if source.is_dir():
            shutil.copytree(
                source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            Path(target).mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


@pytest.mark.server
@pytest.mark.slow
def test_built_image_serves_an_example(tmp_path: Path) -> None:
    """The image's command answers, and the healthcheck of compose.yaml says when it does."""
    image, models = _built(tmp_path / "image"), tmp_path / "models"
    installed = image.run(["python3", "-m", "pip", "show", "--files", "torch-py-backend"])
    assert f"Location: {image.root}" in installed.stdout
    ports = choose_ports("", [0] * 4)
    probe = [word.replace("8003", str(ports[3])) for word in _service()["healthcheck"]["test"][1:]]
    shutil.copytree(_EXAMPLES / "add_sub", models / "add_sub")
    command = [word.replace("/models", str(models)) for word in json.loads(_texts("CMD")[0])]
    names = zip(("http", "grpc", "metrics", "health"), ports, strict=True)
    command += ["--address=127.0.0.1", *(f"--{name}-port={port}" for name, port in names)]
    log = image.root / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=image.environment, cwd=image.root, stdout=file, stderr=file
        )
    try:
        until(
            lambda: process.poll() is not None or image.run(probe).returncode == 0,
            lambda: log.read_text(errors="replace"),
        )
        assert process.poll() is None, log.read_text(errors="replace")
        x = np.arange(16, dtype=np.float32).reshape(1, 16)
        with grpc.InferenceServerClient(f"127.0.0.1:{ports[1]}") as client:
            result = client.infer("add_sub", serving.infer_inputs(grpc, {"INPUT0": x, "INPUT1": x}))
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), 2 * x)
    finally:
        process.terminate()
        process.wait(_LONGEST_S)
    assert image.run(probe).returncode
