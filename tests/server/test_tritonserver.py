"""Finding a tritonserver, its ports and its end; `tests/live` runs real ones."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import living
import psutil
import pytest

from torch_py_backend.errors import ServerError
from torch_py_backend.server import tritonserver
from torch_py_backend.server.tritonserver import ModelState, Server


def _tree(folder: Path, *, stub: bool = True) -> Path:
    """A tritonserver as NVIDIA's containers have it; returns its executable."""
    for name in ("bin/tritonserver", "backends/python/libtriton_python.so"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
        (folder / name).chmod(0o755)
    if stub:
        (folder / "backends/python/triton_python_backend_stub").write_bytes(b"")
    return folder / "bin/tritonserver"


def test_order_of_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--tritonserver comes first, then PATH, then /opt/tritonserver, then the wheel."""
    named, on_path, container = (_tree(tmp_path / name) for name in ("named", "path", "ngc"))
    wheel = tritonserver.find()
    assert "pytriton" in wheel.executable.parts
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in wheel.stub.parts
    monkeypatch.setattr(tritonserver, "NGC", tmp_path / "ngc")
    assert tritonserver.find().executable == container
    monkeypatch.setenv("PATH", str(on_path.parent), prepend=os.pathsep)
    assert tritonserver.find().executable == on_path
    triton = tritonserver.find(named)
    assert triton.executable == named
    assert triton.python_backend == tmp_path / "named/backends/python"
    assert tmp_path / "named/lib" in triton.libraries


def test_a_server_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what is missing; without any server, the extra to install."""
    with pytest.raises(ServerError, match="is not a file"):
        tritonserver.find(tmp_path / "nothing")
    with pytest.raises(ServerError, match="does not support Python"):
        tritonserver.find(_tree(tmp_path, stub=False))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tritonserver, "NGC", tmp_path / "none")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"pip install 'torch-py-backend\[server\]'"):
        tritonserver.find()


def test_the_backend_directory_holds_both_backends(tmp_path: Path) -> None:
    """Files are copied: Triton refuses a library whose real path is elsewhere."""
    tritonserver.populate_backends(tritonserver.find(), tmp_path)
    for name in (
        "python/libtriton_python.so",
        "python/triton_python_backend_utils.py",
        "python/triton_python_backend_stub",
        "pytorch_py/model.py",
        "pytorch_py/torch_py_backend/adapter/__init__.py",
    ):
        assert (tmp_path / name).is_file()
        assert not (tmp_path / name).is_symlink()


def test_environment_leads_to_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's stub runs the first python3 on PATH: a Python without one beside it is refused."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    triton = tritonserver.find()
    values = tritonserver.environment(triton)
    first = Path(values["PATH"].split(os.pathsep)[0])
    assert (first / "python3").resolve() == Path(sys.executable).resolve()
    assert values["LD_LIBRARY_PATH"].endswith(f"{os.pathsep}/somewhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ServerError, match="is not this Python"):
        tritonserver.environment(triton)


def test_ports() -> None:
    """Each 0 becomes a free port, no two are the same; other ports stay."""
    # So many that some would be the same if chosen one by one: the kernel has about 14,000.
    ports = tritonserver.ports(0, 8000, *[0] * 500)
    assert ports[1] == 8000
    assert len(set(ports)) == 502
    assert 0 not in ports
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports[0]))


def test_ports_that_can_be_listened_on() -> None:
    """A port whose last connection has just ended is free, and stays free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        answer, _ = listener.accept()
        answer.close()  # first: the connection's end is remembered on this side
        client.close()
    for _ in range(2):
        tritonserver.check_ports("127.0.0.1", {"--http-port": port, "--grpc-port": 0})


@pytest.mark.parametrize(
    ("address", "requested", "says"),
    [
        ("127.0.0.1", {"--a": 0, "--b": 99999}, "--b is 99999; expected a port from 0 to 65535."),
        ("127.0.0.1", {"--a": 0, "--b": None}, "--b TAKEN on 127.0.0.1 .*: Address already in use"),
        ("0.0.0.0", {"--b": None}, "--b TAKEN on 0.0.0.0 .*: Address already in use"),
        ("192.0.2.1", {"--a": 0}, "--a 0 on 192.0.2.1 .*Choose an --address of this machine."),
    ],
    ids=["too-high", "taken", "taken-for-all-addresses", "address"],
)
def test_ports_that_cannot_be_listened_on(
    address: str, requested: dict[str, int | None], says: str
) -> None:
    """The error names the port and its option."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        named = {option: taken if port is None else port for option, port in requested.items()}
        with pytest.raises(ServerError, match=says.replace("TAKEN", str(taken))):
            tritonserver.check_ports(address, named)


def test_one_port_for_two_services() -> None:
    (port,) = tritonserver.ports(0)
    with pytest.raises(ServerError, match=f"--grpc-port {port} on"):
        tritonserver.check_ports("127.0.0.1", {"--http-port": port, "--grpc-port": port})


def test_a_server_that_was_not_started(tmp_path: Path) -> None:
    """Its methods raise an error, but it may be stopped; its repository must exist."""
    with pytest.raises(ServerError, match="is not a folder; expected a model repository"):
        Server(tmp_path / "none")
    server = Server(tmp_path, http_port=80, grpc_port=0, metrics_port=0, address="0.0.0.0")
    assert server.http_address == "127.0.0.1:80"
    with pytest.raises(ServerError, match="call start"):
        server.wait_loaded()
    server.stop()


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        ([], 30),
        (["--exit-timeout-secs", "5", "--log-verbose", "1"], 5),
        (["--exit-timeout-secs=5", "--exit-timeout-secs=7"], 7),
        (["--exit-timeout-secs=soon"], 30),
        (["--exit-timeout-secs"], 30),
    ],
)
def test_exit_timeout(arguments: list[str], seconds: int) -> None:
    """The last --exit-timeout-secs counts; other text than a number is Triton's to refuse."""
    assert tritonserver.exit_seconds(arguments) == seconds


def test_states_of_models() -> None:
    """A model that is not READY has a reason."""
    ready = tritonserver.parse_state({"name": "a", "version": "1", "state": "READY"})
    assert ready == ModelState("a", "1", True, "")
    failed = tritonserver.parse_state({"name": "b", "state": "UNAVAILABLE", "reason": "because"})
    assert failed == ModelState("b", "", False, "because")


def _stopping(child: str, on_sigterm: str) -> subprocess.Popen[bytes]:
    """Start a process with a child, in place of a tritonserver; it sleeps after SIGTERM."""
    code = (
        "import os, signal, subprocess, time;"
        f"signal.signal(signal.SIGTERM, lambda *_: {on_sigterm});"
        f"child = subprocess.Popen({child!r}, shell=True); print(flush=True);"
        " child.wait(); time.sleep(1000)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_an_end_while_a_process_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux 6.15 and later report ENOENT for a process that is being reaped."""
    with _stopping("exec sleep 1000", "os._exit(3)") as process:
        (child,) = psutil.Process(process.pid).children()
        opened = os.pidfd_open

        def pidfd_open(pid: int, flags: int = 0) -> int:
            if pid == child.pid:
                raise FileNotFoundError(2, "No such file or directory")
            return opened(pid, flags)

        monkeypatch.setattr(os, "pidfd_open", pidfd_open)
        tritonserver.terminate(process, 60, in_children=False)
        assert process.returncode == 3
        assert living.all_end([child])


@pytest.mark.parametrize(
    ("child", "on_sigterm", "in_children", "code"),
    [
        pytest.param("exit", "None", True, -signal.SIGKILL, id="idle"),
        pytest.param("sleep 1000", "time.sleep(0.5) or os._exit(3)", True, 3, id="instance"),
        pytest.param("exit", "time.sleep(0.5) or os._exit(3)", False, 3, id="foreign"),
    ],
)
def test_a_server_without_instances_is_not_waited_for(
    child: str, on_sigterm: str, in_children: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton waits for instances that it has lost: once all have ended, it is killed.

    It ends by itself while an instance runs, or a model may run in tritonserver itself.
    """
    monkeypatch.setattr(tritonserver, "_IDLE_SECONDS", 0.2)
    with _stopping(child, on_sigterm) as process:
        tritonserver.terminate(process, 10_000, in_children=in_children)
        assert process.returncode == code
