from __future__ import annotations

import dataclasses
import json
import re
import signal
import venv
from collections.abc import Iterator
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
from instances import named
from supervised import Supervised
from tritonclient.utils import InferenceServerException

import torch_py_backend
from torch_py_backend.errors import ToolError
from torch_py_backend.server import Server

# Configs of models that Triton itself refuses.
_REFUSED = {
    "misspelt": 'backend: "torch_py_backend"\n' + scenarios.x_to_y().partition("\n")[2],
    "unreadable": 'backend: "pytorch_py"\ninput [{ name: }]\n',
}
_UNKNOWN = scenarios.option("NUM_THREAD", "1")
_WARNING = "the parameter NUM_THREAD is unknown and ignored. Did you mean NUM_THREADS?"
_KEY = "a secret"
# Not every machine has IPv6.
_LOOPBACK = "::1" if Path("/proc/net/if_inet6").exists() else "127.0.0.1"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    function = named("function")
    cached = function.config + "response_cache { enable: true }\n"
    dataclasses.replace(function, config=function.config + _UNKNOWN).lay_out(folder)
    dataclasses.replace(function, name="cached", config=cached).lay_out(folder)
    named("syntax_error").lay_out(folder)
    for name, text in _REFUSED.items():
        (folder / name).mkdir()
        (folder / name / "config.pbtxt").write_text(text)
    for name in ("misspelt/1", ".git", "__pycache__"):  # two hidden folders
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
def served(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    """A server that loads what is changed, and has a response cache."""
    options = ("--reload", "--drain=5", "--restrict=model-repository,health")
    cache = ["--cache-config=local,size=1048576"]
    variables = {
        "TMPDIR": str(tmp_path_factory.mktemp("temporary")),
        "TORCH_PY_BACKEND_ADMIN_KEY": _KEY,
        "http_proxy": "http://127.0.0.1:9",  # not for this machine
    }
    address = f"--address={_LOOPBACK}"
    with supervised.serve(
        repository, *options, address, triton=cache, verbose="", **variables
    ) as running:
        running.wait_loaded()
        yield running


def _logged_by_triton(served: Supervised) -> str:
    match = re.search(r"log +(\S+) is Triton's log", served.log)
    assert match
    return Path(match[1]).read_text()


def test_one_line_a_model_and_answers_over_ipv6(served: Supervised, repository: Path) -> None:
    text = served.log
    assert f"\nREADY   function\nWARNING function: {_WARNING}\n" in text
    assert "Started GRPCInferenceService" not in text
    assert "FAILED  misspelt: unable to find backend library for backend 'torch_" in text
    config = repository / "unreadable" / "config.pbtxt"
    unreadable = f"failed to read text proto from {config}: 2:16: Expected string, got: }}"
    assert f"FAILED  unreadable: {unreadable}\n" in text
    assert "FAILED  syntax_error: model.py fails at SyntaxError: " in text
    first, page, *models, last = re.findall(r"^\S+", text, re.MULTILINE)
    assert (first, page, last) == ("log", "page", "serving")
    # Whichever is known first.
    assert sorted(models) == [*["FAILED"] * 3, *["READY"] * 2, "WARNING"]
    assert "Started GRPCInferenceService" in _logged_by_triton(served)
    with tritonclient.http.InferenceServerClient(served.http) as client:
        x = np.ones((1, 4), dtype=np.float32)
        inputs = serving.infer_inputs(tritonclient.http, {"x": x})
        answer = client.infer("function", inputs).as_numpy("y")
    assert answer.tolist() == [[2.0] * 4]


def test_the_response_cache_of_triton_answers(served: Supervised) -> None:
    for value in (1.0, 2.0, 1.0):
        assert served.infer("cached", value) == [2.0 * value] * 4
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        statistics = client.get_inference_statistics("cached", as_json=True)
    assert statistics["model_stats"][0]["inference_stats"]["cache_hit"]["count"] == "1"


def test_a_changed_model_replaces_the_one_that_serves_once_it_is_ready(
    served: Supervised, repository: Path
) -> None:
    """A broken one does not; one that could not be loaded at the start is, when corrected.

    /ready/MODEL has the warnings of a load as long as they are true.
    """
    assert served.ask("/ready/function") == (200, {"ready": True, "warnings": [_WARNING]})
    config = repository / "function" / "config.pbtxt"
    config.write_text(config.read_text().replace(_UNKNOWN, ""))
    source = repository / "function" / "1" / "model.py"
    text = source.read_text()
    assert "x * 2" in text
    values: list[float] = []
    for factor, event in (
        ("x * 3", "READY +function: reloaded"),
        ("x * (", "FAILED +function: .*; the old one serves on"),
    ):
        served.skip_log()
        source.write_text(text.replace("x * 2", factor))

        def answered(event: str = event) -> object:
            values.append(served.infer("function", 1.0)[0])  # raises if no model serves
            return re.search(rf"CHANGED function[\s\S]*{event}.*", served.text)

        line = served.until(answered)[0]
        served.until(lambda: served.ask("/ready/function") == (200, {"ready": True}))
        assert "\nWARNING" not in served.text
    assert "SyntaxError" in line
    assert values == sorted(values)
    assert {*values} == {2.0, 3.0}
    assert served.infer("function", 1.0) == [3.0] * 4
    (repository / "syntax_error" / "1" / "model.py").write_text(text)
    served.until(lambda: re.search(r"READY +syntax_error", served.text))
    assert served.infer("syntax_error", 1.0) == [2.0] * 4


def test_clients_without_the_key_are_refused(served: Supervised) -> None:
    """`serve` itself has it, and no other process."""
    for one in served.family():
        assert _KEY not in one.environ().values(), living.command(one)
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.unload_model("syntax_error")
        client.unload_model("syntax_error", headers={"triton-grpc-protocol-admin-key": _KEY})
    served.until(lambda: served.ask("/ready/syntax_error")[0] == 404)


def test_a_server_drains_and_leaves_nothing(served: Supervised) -> None:
    """With --drain, readiness ends at once, and what still comes is answered."""
    family, prefix = served.family(), served.prefix()
    assert supervised.regions(prefix)
    served.skip_log()
    served.process.send_signal(signal.SIGINT)
    stopping = {"ready": False, "reason": "the server is being stopped"}
    served.until(lambda: served.ask("/ready/function") == (503, stopping))
    assert served.infer("cached", 1.0) == [2.0] * 4
    assert served.ask("/live")[0] == 200
    # An impatient second signal, as `timeout` sends it, does not interrupt the stopping.
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        served.process.send_signal(number)
    assert served.process.wait(120) == 0
    assert served.text == "stopped\n"
    assert "successfully unloaded 'function'" in _logged_by_triton(served)
    living.wait(family)
    assert supervised.regions(prefix) == []


def test_why_a_server_cannot_start_is_said_in_its_words(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with (
        Server(tmp_path, arguments=["--http-address=1.2.3.4"], log=log) as server,
        pytest.raises(ToolError) as error,
    ):
        server.wait_loaded()
    says = "failed to start HTTP service: Unavailable - Socket"
    assert str(error.value).startswith(f"tritonserver ended with exit code 1: {says}")
    assert str(error.value).endswith(f"; its log says more: {log}.")


def test_a_python_without_torch_is_named(tmp_path: Path) -> None:
    """With the command that installs it: importing our own code there does not fail before."""
    config = scenarios.x_to_y()
    negate = scenarios.Scenario("negate", scenarios.python(models.Negate), config)
    negate.lay_out(tmp_path / "repository")
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python3"
    site = next(tmp_path.glob("venv/lib/python*/site-packages"))
    for path in Path(torch.__file__).parents[1].iterdir():
        if not path.name.startswith("torch") and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    (site / "ours.pth").write_text(f"{Path(torch_py_backend.__file__).parents[1]}\n")
    with supervised.serve(tmp_path / "repository", "--no-page", python=python) as served:
        served.wait_loaded()
        assert not re.search("^page ", served.log, re.MULTILINE)
        with pytest.raises(json.JSONDecodeError):
            served.ask("/")  # not found
        assert served.ask("/live") == (200, {"live": True})
        assert "Started GRPCInferenceService" in served.log  # --verbose prints Triton's log
        assert (
            f"FAILED  negate: {python}, which Triton's stub runs, has no torch."
            f" Run {python} -m pip install torch\n"
        ) in served.log
