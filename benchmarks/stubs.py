"""A tritonserver for measurements inside its stubs, with any versions of this backend.

A version is a checkout; its backend is installed under a name of its own. No module of the package
is used here, so that versions whose modules differ can be compared.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from tritonclient.grpc import service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

ROOT = Path(__file__).parents[1]
"""This checkout."""
GAUGE = Path(__file__).parent / "served" / "gauge.py"
_STUB = "triton_python_backend_stub"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where Triton has it
_PARAMETERS = {bool: "bool", int: "int64", float: "double", str: "string"}
_LOAD_SECONDS = 600
_EXIT_SECONDS = 60
# What Triton 24.10 dies of if a busy machine stalls during a load.
_STALLED = "boost::interprocess::lock_exception"
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Server:
    """A running tritonserver that has loaded its models.

    Attributes:
        grpc: host and port.
    """

    process: subprocess.Popen[bytes]
    grpc: str

    def instances(self) -> list[psutil.Process]:
        """Return the processes that the server has started."""
        return list(psutil.Process(self.process.pid).children(recursive=True))


class StartError(Exception):
    """A model was not loaded, or tritonserver ended."""


@contextlib.contextmanager
def served(
    repository: Path,
    checkouts: Mapping[str, Path],
    variables: Mapping[str, str] | None = None,
    *,
    gauge: bool = False,
) -> Iterator[Server]:
    """Start a tritonserver with all models of a repository; its log lies beside the repository.

    Args:
        repository: the model repository.
        checkouts: versions of this backend by the `backend` of config.pbtxt.
        variables: more environment variables.
        gauge: whether the backends measure their calls (`served/gauge.py`).

    Raises:
        StartError: a model was not loaded.
    """
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as name:
        backends = Path(name, "backends")
        environment = _install_triton(backends) | dict(variables or {})
        for backend, checkout in checkouts.items():
            install(backends / backend, checkout, gauge=gauge)
        server = None
        try:
            while server is None:
                server = _start(repository, backends, environment)
            yield server
        finally:
            if server is not None:
                _stop(server.process)
            for region in _SHARED_MEMORY.glob(f"{Path(name).name}*"):
                region.unlink(missing_ok=True)  # of an instance that was killed


def request(
    model: str, inputs: Mapping[str, Any], parameters: Mapping[str, Any]
) -> service_pb2.ModelInferRequest:
    """Return a gRPC request of arrays; a torch tensor is sent as BF16."""
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, value in inputs.items():
        is_array = isinstance(value, np.ndarray)
        dtype = np_to_triton_dtype(value.dtype) if is_array else "BF16"
        array = value if is_array else value.view(torch.int16).numpy()
        content = serialize_byte_tensor(array) if dtype == "BYTES" else None
        message.inputs.add(name=name, datatype=dtype, shape=array.shape)
        message.raw_input_contents.append(
            array.tobytes() if content is None else content.item() if content.size else b""
        )
    for name, value in parameters.items():
        setattr(message.parameters[name], f"{_PARAMETERS[type(value)]}_param", value)
    return message


def install(folder: Path, checkout: Path, *, gauge: bool) -> None:
    """Install a checkout's backend, as the command `install` does."""
    package = checkout / "src" / "torch_py_backend"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, folder / package.name, ignore=ignored)
    model = checkout / "backends" / "pytorch_py" / "model.py"
    shutil.copy(model, folder / ("base.py" if gauge else "model.py"))
    if gauge:
        shutil.copy(GAUGE, folder / "model.py")


def _triton() -> Path:
    wheel = importlib.util.find_spec("pytriton")
    if wheel is None or wheel.origin is None:
        raise StartError("no tritonserver is installed: pip install nvidia-pytriton.")
    return Path(wheel.origin).parent / "tritonserver"


def _install_triton(backends: Path) -> dict[str, str]:
    """Copy Triton's Python backend; return the environment variables of a server."""
    triton = _triton()
    shutil.copytree(triton / "backends" / "python", backends / "python")
    stubs = triton / "python_backend_stubs"
    shutil.copy2(stubs / "{}.{}".format(*sys.version_info) / _STUB, backends / "python" / _STUB)
    libraries = [triton.parents[1] / "nvidia_pytriton.libs", sysconfig.get_config_var("LIBDIR")]
    values = dict(os.environ)
    # A stub runs the first python3 on PATH.
    for name, folders in (("LD_LIBRARY_PATH", libraries), ("PATH", [Path(sys.executable).parent])):
        values[name] = os.pathsep.join(filter(None, [*map(str, folders), values.get(name)]))
    return values


def _start(repository: Path, backends: Path, environment: Mapping[str, str]) -> Server | None:
    """Start tritonserver; return None if the machine stalled.

    Raises:
        StartError: it ended, or took too long.
    """
    ports = dict(zip(("http", "grpc"), _free_ports(2), strict=True))
    log = repository.parent / "server.log"
    command = [
        str(_triton() / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        f"--backend-config=python,shm-region-prefix-name={backends.parent.name}",
        "--allow-metrics=false",
        *(f"--{service}-address=127.0.0.1" for service in ports),
        *(f"--{service}-port={port}" for service, port in ports.items()),
    ]
    with log.open("wb") as file:
        # Triton's stub would import a model.py from the current folder.
        process = subprocess.Popen(  # noqa: S603  the wheel's executable
            command, env=dict(environment), cwd=backends, stdout=file, stderr=file
        )
    try:
        deadline = time.monotonic() + _LOAD_SECONDS
        while not _is_ready(ports["http"]):
            if process.poll() is not None or time.monotonic() > deadline:
                text = log.read_text(errors="replace")
                if _STALLED in text:
                    _stop(process)
                    return None
                lines = text.splitlines()
                reasons = [line for line in lines if line.startswith("E")] or lines
                raise StartError("tritonserver did not start:\n" + "\n".join(reasons[-9:]))
            time.sleep(_POLL_SECONDS)
    except BaseException:
        _stop(process)
        raise
    return Server(process, f"127.0.0.1:{ports['grpc']}")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _is_ready(port: int) -> bool:
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5),
    ):
        return True
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server, whose instances end with it."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
