"""Finding a tritonserver, and laying out what it needs; `tests/live` runs real ones."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
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


def test_the_given_server_comes_first(tmp_path: Path) -> None:
    """--tritonserver names the server, its backend and libraries beside it."""
    executable = _tree(tmp_path)
    found = tritonserver.find(executable)
    assert found.executable == executable
    assert found.python_backend == tmp_path / "backends/python"
    assert tmp_path / "lib" in found.libraries


def test_then_the_one_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tritonserver on PATH wins over the wheel."""
    executable = _tree(tmp_path)
    monkeypatch.setenv("PATH", str(executable.parent), prepend=os.pathsep)
    assert tritonserver.find().executable == executable


def test_then_the_container_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/opt/tritonserver wins over the wheel."""
    monkeypatch.setattr(tritonserver, "NGC", tmp_path)
    executable = _tree(tmp_path)
    assert tritonserver.find().executable == executable


def test_then_the_wheel() -> None:
    """The wheel's server comes with the stub for this Python."""
    found = tritonserver.find()
    assert "pytriton" in found.executable.parts
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in found.stub.parts


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda folder: folder / "nothing", "is not a file"),
        (lambda folder: _tree(folder, stub=False), "does not support Python"),
    ],
    ids=["no file", "no stub"],
)
def test_a_server_that_will_not_do(prepare: object, says: str, tmp_path: Path) -> None:
    """A server without its parts is refused before it is started."""
    with pytest.raises(ServerError, match=says):
        tritonserver.find(prepare(tmp_path))  # type: ignore[operator]


def test_no_server_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal names the command that would cure it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tritonserver, "NGC", tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"pip install 'torch-py-backend\[server\]'"):
        tritonserver.find()


def test_layout_holds_both_backends(tmp_path: Path) -> None:
    """Files, not links: Triton refuses a library whose real path lies elsewhere."""
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


def test_environment_leads_to_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's stub runs the first python3 on PATH."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    values = tritonserver.environment(tritonserver.find())
    first = Path(values["PATH"].split(os.pathsep)[0])
    assert (first / "python3").resolve() == Path(sys.executable).resolve()
    assert values["LD_LIBRARY_PATH"].endswith(f"{os.pathsep}/somewhere")


def test_environment_of_a_lone_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without a python3 beside it is refused: the stub would run another one."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ServerError, match="is not this Python"):
        tritonserver.environment(tritonserver.find())


def test_ports() -> None:
    """What is asked for stays; of the free ones no two are the same, and nobody listens there."""
    # So many that chosen one by one some would be the same: the kernel has some 14,000 to give.
    found = tritonserver.ports(0, 8000, *[0] * 500)
    assert found[1] == 8000
    assert len(set(found)) == 502
    assert 0 not in found
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", found[0]))


def test_ports_that_can_be_listened_on() -> None:
    """Free ports pass, also one whose last connection has just ended, and stay free."""
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
        ("127.0.0.1", {"--a": -1}, "--a is -1; expected a port from 0 to 65535."),
        ("127.0.0.1", {"--a": 0, "--b": None}, "--b TAKEN on 127.0.0.1 .*: Address already in use"),
        ("0.0.0.0", {"--b": None}, "--b TAKEN on 0.0.0.0 .*: Address already in use"),
        ("192.0.2.1", {"--a": 0}, "--a 0 on 192.0.2.1 .*Choose an --address of this machine."),
    ],
    ids=["too-high", "negative", "taken", "taken-for-all-addresses", "address"],
)
def test_ports_that_cannot_be_listened_on(
    address: str, requested: dict[str, int | None], says: str
) -> None:
    """The refusal names the port and its option."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        named = {option: taken if port is None else port for option, port in requested.items()}
        with pytest.raises(ServerError, match=says.replace("TAKEN", str(taken))):
            tritonserver.check_ports(address, named)


def test_one_port_for_two_services() -> None:
    """A port that is named twice is taken when it is named again."""
    (port,) = tritonserver.ports(0)
    with pytest.raises(ServerError, match=f"--grpc-port {port} on"):
        tritonserver.check_ports("127.0.0.1", {"--http-port": port, "--grpc-port": port})


def test_a_repository_that_is_missing(tmp_path: Path) -> None:
    """A mistyped folder is found before anything starts."""
    with pytest.raises(ServerError, match="is not a folder; expected a model repository"):
        Server(tmp_path / "none")


def test_a_server_that_was_not_started(tmp_path: Path) -> None:
    """Asking it anything says so; stopping it is no error."""
    made = Server(tmp_path, http_port=0, grpc_port=0, metrics_port=0)
    with pytest.raises(ServerError, match="call start"):
        made.wait_loaded()
    made.stop()


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        ([], 30),
        (["--log-verbose=1"], 30),
        (["--exit-timeout-secs=120"], 120),
        (["--exit-timeout-secs", "5", "--log-verbose", "1"], 5),
        (["--exit-timeout-secs=5", "--exit-timeout-secs=7"], 7),
        (["--exit-timeout-secs=soon"], 30),
        (["--exit-timeout-secs"], 30),
    ],
)
def test_time_to_leave(arguments: list[str], seconds: int) -> None:
    """Who gives tritonserver more time to end, or less, gives us the same."""
    assert tritonserver.exit_seconds(arguments) == seconds


def test_states_of_models() -> None:
    """Triton's index as plain data; what is not READY carries a reason."""
    ready = tritonserver.parse_state({"name": "a", "version": "1", "state": "READY"})
    assert ready == ModelState("a", "1", True, "")
    failed = tritonserver.parse_state({"name": "b", "state": "UNAVAILABLE", "reason": "because"})
    assert failed == ModelState("b", "", False, "because")


def test_an_end_while_the_kernel_forgets_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a process that is being reaped Linux 6.15 and later say ENOENT: it has ended."""
    code = "import subprocess; subprocess.run(['sleep', '1000'], check=False)"
    process = subprocess.Popen([sys.executable, "-c", code])
    (child,) = _until(lambda: psutil.Process(process.pid).children())
    opened = os.pidfd_open

    def pidfd_open(pid: int, flags: int = 0) -> int:
        if pid == child.pid:
            raise FileNotFoundError(2, "No such file or directory")
        return opened(pid, flags)

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    tritonserver._terminate(process, 60, in_children=False)
    assert process.poll() is not None
    assert living.all_end([child])


def _leaving(child: str, on_sigterm: str) -> subprocess.Popen[bytes]:
    """A process with a child, in the role of a tritonserver; it sleeps after SIGTERM, too."""
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


def test_a_server_without_instances_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its models ran in processes, and those are gone: it waits for what Triton has lost."""
    monkeypatch.setattr(tritonserver, "_IDLE_SECONDS", 0.2)
    with _leaving("exit", on_sigterm="None") as process:
        tritonserver._terminate(process, 10_000, in_children=True)
        assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("child", "in_children"), [("sleep 1000", True), ("exit", False)], ids=["instance", "foreign"]
)
def test_a_server_that_may_still_work_has_its_time(
    child: str, in_children: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance runs, or a model inside of tritonserver may: it ends by itself."""
    monkeypatch.setattr(tritonserver, "_IDLE_SECONDS", 0.0)
    with _leaving(child, on_sigterm="time.sleep(0.5) or os._exit(3)") as process:
        tritonserver._terminate(process, 10_000, in_children=in_children)
        assert process.returncode == 3


def _until(what: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    """The first list that is not empty."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return what()
