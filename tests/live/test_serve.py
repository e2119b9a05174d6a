"""`torch-py-backend serve`: what it prints, and what it leaves behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

import living
import models
import numpy as np
import pytest
import scenarios
import serving
import supervised
import torch
import tritonclient.grpc
import tritonclient.http

import torch_py_backend
from torch_py_backend.server import installation

# Configs of models that Triton itself refuses.
_REFUSED = {
    "misspelt": 'backend: "torch_py_backend"\n' + scenarios.x_to_y().partition("\n")[2],
    "unreadable": 'backend: "pytorch_py"\ninput [{ name: }]\n',
}
# Not every machine has IPv6.
_LOOPBACK = "::1" if Path("/proc/net/if_inet6").exists() else "127.0.0.1"


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


def test_serves_and_leaves_nothing(repository: Path) -> None:
    """One line a model, answers over both protocols, and nothing left after signals."""
    with supervised.serve(repository, verbose="", TMPDIR=str(repository.parent)) as served:
        served.wait_loaded()
        text, family, prefix = served.log, served.family(), served.prefix()
        assert "READY   function 1\n" in text
        assert "FAILED  misspelt 1: unable to find backend library for backend 'torch_" in text
        config = repository / "unreadable" / "config.pbtxt"
        unreadable = f"failed to read text proto from {config}: 2:16: Expected string, got: }}"
        assert f"FAILED  unreadable: {unreadable}\n" in text
        assert "FAILED  syntax_error 1: model.py fails at line 3: SyntaxError" in text
        first, *models, last = re.findall(r"^\S+", text, re.MULTILINE)
        assert (first, last) == ("log", "serving")
        assert sorted(models) == [*["FAILED"] * 3, "READY"]  # whichever is known first
        match = re.search(r"log +(\S+) is Triton's log", text)
        assert match
        log = Path(match[1])
        assert "Started GRPCInferenceService" in log.read_text()
        assert supervised.regions(prefix)
        for module, address in (
            (tritonclient.http, served.http),
            (tritonclient.grpc, served.grpc),
        ):
            client = module.InferenceServerClient(address)
            inputs = serving.infer_inputs(module, {"x": np.ones((1, 4), dtype=np.float32)})
            answer = client.infer("function", inputs).as_numpy("y")
            assert answer.tolist() == [[2.0] * 4]
            client.close()
        served.skip_log()
        # An impatient second signal, as `timeout` sends it, does not interrupt the stopping.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            served.process.send_signal(number)
        assert served.process.wait(120) == 0
        assert served.text == "stopped\n"
        assert "successfully unloaded 'function'" in log.read_text()
        assert living.all_end(family)
        assert supervised.regions(prefix) == []


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
        supervised.until(lambda: "READY   function 1: reloaded" in served.text, served)
        supervised.until(lambda: served.ask("/ready/function") == (200, {"ready": True}), served)
        assert "\nWARNING" not in served.text


def test_requests_are_taken_while_it_drains(repository: Path) -> None:
    """With --drain, SIGTERM ends readiness at once; what still comes is answered, then it ends.

    Over IPv6, too.
    """
    with supervised.serve(repository, "--drain=10", f"--address={_LOOPBACK}") as served:
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
            ("x * 3", "READY +function 1: reloaded"),
            ("x * (", "FAILED +function 1:"),
        ):
            served.skip_log()
            source.write_text(text.replace("x * 2", factor))

            def answered(event: str = event) -> object:
                values.append(served.infer("function", 1.0))  # raises if no model serves
                return re.search(rf"CHANGED function[\s\S]*{event}.*", served.text)

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
        ("--cache-config=none,size=1", f"{_ENDS}creating server: Invalid argument - unable to"),
    ],
)
def test_a_server_that_cannot_start(argument: str, says: str, repository: Path) -> None:
    """A wrong argument for tritonserver is an error with Triton's words, not a wait for ever."""
    folder = str(repository.parent)  # the log stays
    with supervised.serve(repository, verbose="", triton=[argument], TMPDIR=folder) as served:
        assert served.process.wait(120) == 1
        assert f"error: tritonserver {says}" in served.log
        log = re.search(r"; its log says more: (\S+)\.\n", served.log)
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


@pytest.mark.skipif(
    "pytriton" not in installation.TritonInstallation().executable.parts,
    reason="a fault of servers up to 24.10; newer ones serve models with numpy 2",
)
def test_numpy_too_new_for_the_stub(tmp_path: Path) -> None:
    """Numpy 2 under a stub of 24.10 would garble tensors; the load is refused instead."""
    scenarios.Scenario("negate", scenarios.python(models.Negate), scenarios.x_to_y()).lay_out(
        tmp_path / "repository"
    )
    python = _environment_with_numpy_2(tmp_path / "venv")
    with supervised.serve(tmp_path / "repository", python=python) as served:
        served.wait_loaded()
        assert re.search(r"FAILED +negate 1: .*numpy 2\.\S+ garbles tensors", served.log)
        assert "Install numpy<2" in served.log
        assert "no model serves; listening on" in served.log


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
    with supervised.serve(tmp_path / "repository", python=python) as served:
        served.wait_loaded()
        assert (
            f"FAILED  negate 1: {python}, which Triton's stub runs, has no torch."
            f" Run {python} -m pip install torch\n"
        ) in served.log


def _environment_with_numpy_2(folder: Path) -> Path:
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
    return python
