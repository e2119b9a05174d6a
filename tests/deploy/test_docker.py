"""docker/: the image's steps, run without a container engine.

The Dockerfile's COPY and RUN lines are carried out in order in a scratch tree that is laid out like
NVIDIA's image, with a fresh virtual environment in the role of the system's Python. Its CMD then
serves an example.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tritonclient import grpc

from torch_py_backend.server import triton_installation, tritonserver
from torch_py_backend.server.ports import choose_ports

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = ROOT / "docker" / "compose.yaml"
EXAMPLES = ROOT / "examples" / "model_repository"
LONGEST_START = 300  # seconds


# --- reading ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One instruction of a Dockerfile."""

    instruction: str
    text: str


def read_dockerfile(text: str) -> list[Step]:
    """The instructions, with comments dropped and continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    words = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [Step(instruction.upper(), rest.strip()) for instruction, rest in words]


STEPS = read_dockerfile(DOCKERFILE.read_text(encoding="utf-8"))


def texts(instruction: str) -> list[str]:
    return [step.text for step in STEPS if step.instruction == instruction]


def arguments() -> dict[str, str]:
    """ARGs that have a default."""
    pairs = [text.partition("=") for text in texts("ARG")]
    return {name: shlex.split(value)[0] for name, equals, value in pairs if equals}


def healthcheck() -> list[str]:
    kind, *command = compose_service()["healthcheck"]["test"]
    assert kind == "CMD"
    return list(command)


def compose_service() -> dict[str, Any]:
    document = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    (service,) = document["services"].values()
    return dict(service)


# --- the files as they are -------------------------------------------------------------------


def test_base_image_is_a_triton_that_was_tried() -> None:
    assert texts("FROM") == ["nvcr.io/nvidia/tritonserver:${TRITON_VERSION}-py3"]
    assert f" ({arguments()['TRITON_VERSION']}) |" in (ROOT / "docs/compatibility.md").read_text()


def test_instructions_stand_in_an_order_that_keeps_torch_cached() -> None:
    order = [step.instruction for step in STEPS]
    assert order[:2] == ["ARG", "FROM"]
    assert order[-1] == "CMD"
    torch, ours = (order.index("RUN"), len(order) - 1 - order[::-1].index("RUN"))
    copies = [position for position, one in enumerate(order) if one == "COPY"]
    # A change of our sources must not fetch torch again.
    assert "${TORCH}" in STEPS[torch].text
    assert torch < min(copies) <= max(copies) < ours
    assert "torch-py-backend install" in STEPS[ours].text


def test_every_argument_is_declared_where_it_is_used() -> None:
    """An ARG before FROM is unknown after it, and docker then fills in nothing, silently."""
    known: set[str] = set()
    for step in STEPS:
        used = set(re.findall(r"\$\{?(\w+)", step.text))
        assert used <= known, step
        if step.instruction == "FROM":
            known.clear()
        if step.instruction == "ARG":
            known.add(step.text.partition("=")[0])


def test_dockerignore_lets_through_what_is_copied() -> None:
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_through = {line[1:] for line in patterns if line.startswith("!")}
    copied = {source for text in texts("COPY") for source in text.split()[:-1]}
    assert "*" in patterns
    assert let_through == copied


def test_compose_builds_our_image_with_shared_memory_and_the_examples() -> None:
    service = compose_service()
    folder = COMPOSE.parent
    context = folder / service["build"]["context"]
    assert context.resolve() == ROOT
    assert (context / service["build"]["dockerfile"]).resolve() == DOCKERFILE
    # Docker's own 64 MB do not last.
    assert service["shm_size"] == "1gb"
    # Nor do the 10 s that Docker waits before it kills.
    grace = int(service["stop_grace_period"].removesuffix("s"))
    assert grace > tritonserver._EXIT_SECONDS + 2 * tritonserver._GRACE_SECONDS
    (volume,) = service["volumes"]
    source, target, mode = volume.split(":")
    assert (folder / source).resolve() == EXAMPLES
    assert (target, mode) == ("/models", "ro")
    assert json.loads(texts("CMD")[0])[:3] == ["torch-py-backend", "serve", target]
    ports = ["8000", "8001", "8002", "8003"]
    assert [port.split(":")[-1] for port in service["ports"]] == ports
    assert texts("EXPOSE") == [" ".join(ports)]


# --- the image, built and run in a scratch tree ----------------------------------------------


@dataclass(frozen=True)
class Image:
    """A scratch tree in the role of the image's file system."""

    root: Path
    environment: dict[str, str]

    def place(self, text: str) -> str:
        """The image's paths as paths of the scratch tree."""
        return text.replace("/opt/", f"{self.root}/opt/")

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment,
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The image after the Dockerfile's last step."""
    root = tmp_path_factory.mktemp("image")
    triton = triton_installation.find()
    base = root / "opt" / "tritonserver"
    lay_out_base(triton, base)
    built = Image(root, environment_of(triton, base, make_python(root / "python")))
    for step in STEPS:
        if step.instruction == "COPY":
            copy(built.place(step.text))
        if step.instruction == "RUN":
            # What a container engine does with a RUN line.
            done = built.run(["/bin/sh", "-c", built.place(step.text)])
            assert done.returncode == 0, f"{step.text}\n{done.stdout}"
            # pip's warning for an extra that is not in pyproject.toml.
            assert "does not provide the extra" not in done.stdout
    return built


def lay_out_base(triton: triton_installation.TritonInstallation, base: Path) -> None:
    """What NVIDIA's image holds in /opt/tritonserver: bin, lib, and its Python backend."""
    python = base / "backends" / "python"
    shutil.copytree(triton.python_backend, python)
    shutil.copy2(triton.stub, python / triton.stub.name)
    for folder in ("bin", "lib"):
        (base / folder).mkdir()
    shutil.copy2(triton.executable, base / "bin" / "tritonserver")
    for library in triton.libraries[0].glob("*.so*"):
        (base / "lib" / library.name).symlink_to(library)


def make_python(folder: Path) -> Path:
    """A fresh virtual environment that finds what the running one holds, but for our package."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for kind in ("purelib", "platlib"):
        for entry in Path(sysconfig.get_path(kind)).iterdir():
            link = borrowed / entry.name
            if "torch_py_backend" not in entry.name and not link.is_symlink():
                link.symlink_to(entry)
    (own,) = folder.glob("lib/python3*/site-packages")
    (own / "borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")
    return folder


def environment_of(
    triton: triton_installation.TritonInstallation, base: Path, python: Path
) -> dict[str, str]:
    """What RUN lines and the server see: the image's Python and server first, ARGs as variables."""
    foreign = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    values = {name: value for name, value in os.environ.items() if name not in foreign}
    values |= arguments()
    values["PATH"] = os.pathsep.join([f"{python}/bin", f"{base}/bin", values.get("PATH", "")])
    # Beside the server's own libraries the stub needs libpython.
    libraries = [base / "lib", *triton.libraries[1:]]
    values["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    return values


def copy(text: str) -> None:
    """COPY as docker has it: files go into the last path, of a folder what it contains."""
    *sources, target = text.split()
    for source in (ROOT / one for one in sources):
        if source.is_dir():
            shutil.copytree(
                source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            Path(target).mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def entry_point(models: Path, ports: Sequence[int]) -> list[str]:
    """The image's CMD, on free ports and with models mounted where compose has the examples."""
    command = [word.replace("/models", str(models)) for word in json.loads(texts("CMD")[0])]
    services = zip(("http", "grpc", "metrics", "health"), ports, strict=True)
    # The last one counts.
    return [*command, "--address=127.0.0.1", *(f"--{name}-port={port}" for name, port in services)]


def stock_server(image: Image, ports: Sequence[int]) -> list[str]:
    """Triton's own command, which finds the backend in its directory, with one model."""
    command = ["tritonserver", f"--model-repository={EXAMPLES}"]
    command += ["--model-control-mode=explicit", "--load-model=add_sub"]
    command.append(image.place("--backend-directory=/opt/tritonserver/backends"))
    for service, port in zip(("http", "grpc", "metrics"), ports, strict=False):
        command += [f"--{service}-address=127.0.0.1", f"--{service}-port={port}"]
    return command


@contextmanager
def running(image: Image, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The command as the image would run it."""
    with (image.root / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=image.environment,
            cwd=image.root,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(60)
    finally:
        # Its own session is its process group: what it started and left behind ends here.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def healthy(image: Image, command: Sequence[str]) -> bool:
    return image.run(command).returncode == 0


def wait_healthy(image: Image, process: subprocess.Popen[bytes], command: Sequence[str]) -> None:
    deadline = time.monotonic() + LONGEST_START
    while not healthy(image, command):
        log = (image.root / "server.log").read_text(encoding="utf-8", errors="replace")
        assert process.poll() is None, log
        assert time.monotonic() < deadline, log
        time.sleep(0.2)


@pytest.mark.server
@pytest.mark.slow
def test_built_image_serves_an_example(image: Image, tmp_path: Path) -> None:
    installed = image.run(["python3", "-m", "pip", "show", "--files", "torch-py-backend"])
    assert f"Location: {image.root}" in installed.stdout
    ports = choose_ports(0, 0, 0, 0)
    probe = [word.replace("8003", str(ports[3])) for word in healthcheck()]
    shutil.copytree(EXAMPLES / "add_sub", tmp_path / "add_sub")
    with running(image, entry_point(tmp_path, ports)) as process:
        wait_healthy(image, process, probe)
        check_answers(ports[1])
    assert not healthy(image, probe)


@pytest.mark.server
@pytest.mark.slow
def test_built_image_s_own_server_finds_the_backend(image: Image) -> None:
    # Without the installed package there is only the copy in the backend's folder to be served by.
    image.run(["python3", "-m", "pip", "uninstall", "--yes", "torch-py-backend"])
    assert image.run(["python3", "-c", "import torch"]).returncode == 0
    assert "No module" in image.run(["python3", "-c", "import torch_py_backend"]).stdout

    ports = choose_ports(0, 0, 0)
    ready = f"http://127.0.0.1:{ports[0]}/v2/health/ready"
    probe = [*healthcheck()[:2], f"import urllib.request as u; u.urlopen({ready!r}, timeout=5)"]
    with running(image, stock_server(image, ports)) as process:
        wait_healthy(image, process, probe)
        check_answers(ports[1])
    assert not healthy(image, probe)


def check_answers(port: int) -> None:
    first = np.arange(16, dtype=np.float32).reshape(1, 16)
    total, difference = add_and_subtract(port, first, np.full_like(first, 3))
    np.testing.assert_array_equal(total, first + 3)
    np.testing.assert_array_equal(difference, first - 3)


def add_and_subtract(
    port: int, *operands: np.ndarray[Any, Any]
) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    inputs = []
    for number, operand in enumerate(operands):
        inputs.append(grpc.InferInput(f"INPUT{number}", list(operand.shape), "FP32"))
        inputs[-1].set_data_from_numpy(operand)
    with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        result = client.infer("add_sub", inputs)
    return [result.as_numpy(name) for name in ("OUTPUT0", "OUTPUT1")]
