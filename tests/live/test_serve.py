"""`torch-py-backend serve`: what it prints, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

import living
import models
import numpy as np
import psutil
import pytest
import scenarios
import serving
import supervised
import torch
import tritonclient.grpc
import tritonclient.http

import torch_py_backend
from torch_py_backend.server import Server, preflight, triton_installation

_SERVE = "from torch_py_backend.cli import app; app()"
_PORTS = ["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--health-port=0"]
_SERVING = re.compile(
    rb"(?:serving|listening) on http://(\S+) and grpc://(\S+); metrics on http://(\S+)/metrics"
)


# Configs of models that Triton itself refuses.
_REFUSED = {
    "misspelt": 'backend: "torch_py_backend"\n' + scenarios.x_to_y().partition("\n")[2],
    "unreadable": 'backend: "pytorch_py"\ninput [{ name: }]\n',
}


def _regions(prefix: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{prefix}*"))


def _prefix(family: list[psutil.Process]) -> str:
    """The prefix of a server's regions, told from the arguments of its tritonserver."""
    for one in family:
        match = re.search(r"shm-region-prefix-name=(\S+)", living.command(one))
        if match:
            return match[1]
    raise AssertionError("no tritonserver among the processes")


def _start(
    repository: Path, *arguments: str, python: str = sys.executable
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [python, "-c", _SERVE, "serve", str(repository), *_PORTS, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"TMPDIR": str(repository.parent)},  # the log stays
    )


def _read_until(process: subprocess.Popen[bytes], pattern: re.Pattern[bytes]) -> bytes:
    """What the process prints, up to the line that matches."""
    assert process.stdout is not None
    text = b""
    for line in process.stdout:
        text += line
        if pattern.search(line):
            return text
    raise AssertionError(text.decode(errors="replace"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    for name in ("function", "syntax_error"):
        next(one for one in scenarios.TABLE if one.name == name).lay_out(folder)
    for name, text in _REFUSED.items():
        (folder / name).mkdir()
        (folder / name / "config.pbtxt").write_text(text)
    (folder / "misspelt" / "1").mkdir()
    return folder


@pytest.mark.parametrize(
    "numbers",
    # An impatient second signal, as `timeout` sends it, does not interrupt the stopping.
    [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM)],
    ids=["SIGINT", "SIGTERM and others"],
)
def test_serves_and_leaves_nothing(numbers: tuple[signal.Signals, ...], repository: Path) -> None:
    """One line a model, answers over both protocols, and nothing left after a signal."""
    process = _start(repository)
    try:
        text = _read_until(process, _SERVING)
        family = living.descendants(process.pid)
        assert re.search(rb"READY +function 1", text)
        assert re.search(rb"FAILED +syntax_error 1: model.py fails at line 3: SyntaxError", text)
        assert (
            b"FAILED  misspelt 1: unable to find backend library for backend 'torch_py_backend'."
            b" Did you mean pytorch_py?\n"
        ) in text
        config = os.fsencode(repository / "unreadable" / "config.pbtxt")
        unreadable = (
            b"failed to read text proto from " + config + b": 2:16: Expected string, got: }"
        )
        assert b"FAILED  unreadable: " + unreadable + b"\n" in text
        first, *models, last = re.findall(rb"^\S+", text, re.MULTILINE)
        assert (first, last) == (b"log", b"serving")
        assert sorted(models) == [*[b"FAILED"] * 3, b"READY"]  # whichever is known first
        log = Path(re.search(rb"log +(\S+) is Triton's log", text)[1].decode())  # type: ignore[index]
        assert "Started GRPCInferenceService" in log.read_text()
        prefix = _prefix(family)
        assert _regions(prefix)
        http, grpc, _ = (part.decode() for part in _SERVING.search(text).groups())  # type: ignore[union-attr]
        for module, address in ((tritonclient.http, http), (tritonclient.grpc, grpc)):
            client = module.InferenceServerClient(address)
            inputs = serving.infer_inputs(module, {"x": np.ones((1, 4), dtype=np.float32)})
            answer = client.infer("function", inputs).as_numpy("y")
            assert answer.tolist() == [[2.0] * 4]
            client.close()
        for number in numbers:
            process.send_signal(number)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert output == b"stopped\n"
        assert "successfully unloaded 'function'" in log.read_text()
        assert living.all_end(family)
        assert _regions(prefix) == []
    finally:
        process.kill()


def test_warnings_of_a_load(repository: Path) -> None:
    """They are printed beside READY, and /ready/MODEL has them as long as they are true."""
    path = repository / "function" / "config.pbtxt"
    good = path.read_text()
    path.write_text(good + 'parameters { key: "NUM_THREAD" value { string_value: "1" } }\n')
    warning = "the parameter NUM_THREAD is unknown and ignored. Did you mean NUM_THREADS?"
    line = f"\nREADY   function 1\nWARNING function: {warning}\n"
    ready = 200, {"ready": True, "warnings": [warning]}
    with supervised.serve(repository, "--reload") as served:
        served.wait_loaded()
        assert line in served.text
        assert served.ask("/ready/function") == ready
        served.skip_log()
        path.write_text(good)
        supervised.until(lambda: "READY   function: reloaded" in served.text, served)
        supervised.until(lambda: served.ask("/ready/function") == (200, {"ready": True}), served)
        assert "\nWARNING" not in served.text


def test_requests_are_taken_while_it_drains(repository: Path) -> None:
    """With --drain, SIGTERM ends readiness at once; what still comes is answered, then it ends."""
    with supervised.serve(repository, "--drain=10") as served:
        served.wait_loaded()
        served.process.send_signal(signal.SIGTERM)
        stopping = {"ready": False, "reason": "the server is being stopped"}
        supervised.until(lambda: served.ask("/ready/function") == (503, stopping), served)
        assert served.infer("function", 1.0) == [2.0] * 4
        assert served.ask("/live")[0] == 200
        assert served.process.wait(60) == 0


def test_reload(repository: Path) -> None:
    """A changed model replaces the one that serves when it is READY; a broken one does not."""
    source = repository / "function" / "1" / "model.py"
    text = source.read_text()
    assert "x * 2" in text
    with supervised.serve(repository, "--reload") as served:
        served.wait_loaded()
        values: list[list[float]] = []
        for factor, event in (
            ("x * 3", "READY +function: reloaded"),
            ("x * (", "FAILED +function:"),
        ):
            served.skip_log()
            source.write_text(text.replace("x * 2", factor))

            def answered(event: str = event) -> object:
                values.append(served.infer("function", 1.0))  # raises if no model serves
                return re.search(rf"CHANGED function: 1/model.py[\s\S]*{event}.*", served.text)

            line = supervised.until(answered, served)[0]
        assert "SyntaxError" in line
        assert [value[0] for value in values] == sorted(value[0] for value in values)
        assert {value[0] for value in values} == {2.0, 3.0}
        assert served.infer("function", 1.0) == [3.0] * 4
        # A model that could not be loaded at the start, and is corrected.
        broken = repository / "syntax_error" / "1" / "model.py"
        broken.write_text(text)
        supervised.until(lambda: re.search(r"READY +syntax_error 1", served.text), served)
        assert served.infer("syntax_error", 1.0) == [2.0] * 4


def test_reload_needs_the_model_control(repository: Path) -> None:
    """Where Triton itself decides what is loaded, --reload is refused."""
    process = _start(repository, "--reload", "--", "--model-control-mode=poll")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert b"--reload was given, and Triton's model control mode is poll" in output


def test_an_empty_repository(tmp_path: Path) -> None:
    """With --allow-empty a repository without models is served; --verbose prints Triton's log."""
    with supervised.serve(tmp_path, "--allow-empty") as served:
        served.wait_loaded()
        assert served.ask("/ready") == (200, {"ready": True})
        assert "Started GRPCInferenceService" in served.text
        assert "is Triton's log" not in served.text


_ENDS = "ended with exit code 1: "


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--no-such-option", f"{_ENDS}unrecognized option '--no-such-option'"),
        ("--cache-config=x", f'{_ENDS}Bad option: "--cache-config". No cache specified.'),
        ("--http-address=1.2.3.4", f"{_ENDS}failed to start HTTP service: Unavailable - Socket"),
        ("--cache-config=none,size=1", "could not start: Invalid argument: unable to find 'lib"),
        ("--model-repository=/none", "could not start: Internal: failed to stat file /none; its"),
    ],
)
def test_a_server_that_cannot_start(argument: str, says: str, repository: Path) -> None:
    """A wrong argument for tritonserver is an error with Triton's words, not a wait for ever."""
    process = _start(repository, "--", argument)
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1
    text = output.decode()
    assert f"error: tritonserver {says}" in text
    log = re.search(r"; its log says more: (\S+)\.\n", text)
    assert log
    assert Path(log[1]).is_file()


def test_response_cache(repository: Path) -> None:
    """The cache of Triton's guide is found where tritonserver is installed, and answers."""
    path = repository / "function" / "config.pbtxt"
    path.write_text(path.read_text() + "response_cache { enable: true }\n")
    with supervised.serve(repository, triton=["--cache-config=local,size=1048576"]) as served:
        served.wait_loaded()
        for value in (1.0, 2.0, 1.0):
            assert served.infer("function", value) == [2.0 * value] * 4
        with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
            statistics = client.get_inference_statistics("function", as_json=True)
        assert statistics["model_stats"][0]["inference_stats"]["cache_hit"]["count"] == "1"


def test_a_stopped_instance_does_not_outlive_the_server(repository: Path, tmp_path: Path) -> None:
    """An instance that was killed leaves no process and no shared memory once we stop."""
    with (
        (tmp_path / "log").open("wb") as log,
        Server(repository, http_port=0, grpc_port=0, metrics_port=0, log=log) as server,
    ):
        server.wait_loaded(timeout=400)
        triton = psutil.Process(server.process.pid)
        family = living.descendants(triton.pid)
        prefix = _prefix([triton])
        assert _regions(prefix)
        for stub in family:
            stub.kill()
    assert living.all_end(family)
    assert _regions(prefix) == []


@pytest.mark.skipif(
    not preflight.corrupts_numpy_2(triton_installation.find()),
    reason="a fault of servers up to 24.10; newer ones serve models with numpy 2",
)
def test_numpy_too_new_for_the_stub(tmp_path: Path) -> None:
    """Numpy 2 under a stub of 24.10 would garble tensors; the load is refused instead."""
    scenarios.Scenario("negate", scenarios.python(models.Negate), scenarios.x_to_y()).lay_out(
        tmp_path / "repository"
    )
    python = _environment_with_numpy_2(tmp_path / "venv")
    process = _start(tmp_path / "repository", python=python)
    try:
        text = _read_until(process, _SERVING).decode(errors="replace")
        assert re.search(r"FAILED +negate 1: .*numpy 2\.\S+ garbles tensors", text)
        assert "Install numpy<2" in text
        assert "no model serves; listening on" in text
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    finally:
        process.kill()


def test_a_stub_without_torch(tmp_path: Path) -> None:
    """The Python that lacks it is named, with the command that installs it."""
    scenarios.Scenario("negate", scenarios.python(models.Negate), scenarios.x_to_y()).lay_out(
        tmp_path / "repository"
    )
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python3"
    site = next(tmp_path.glob("venv/lib/python*/site-packages"))
    for path in Path(torch.__file__).parents[1].iterdir():
        if not path.name.startswith("torch") and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    (site / "ours.pth").write_text(f"{Path(torch_py_backend.__file__).parents[1]}\n")
    process = _start(tmp_path / "repository", python=os.fspath(python))
    try:
        text = _read_until(process, _SERVING).decode(errors="replace")
        assert (
            f"FAILED  negate 1: {python}, which Triton's stub runs, has no torch."
            f" Run {python} -m pip install torch.\n"
        ) in text
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    finally:
        process.kill()


def _environment_with_numpy_2(folder: Path) -> str:
    """This environment, but for its numpy."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python3"
    site = Path(next(folder.glob("lib/python*/site-packages")))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--target", site, "numpy>=2,<2.3"],
        check=True,
    )
    ours = [path for path in sys.path if path.endswith(("site-packages", "src"))]
    (site / "ours.pth").write_text("\n".join(ours) + "\n")
    return os.fspath(python)
