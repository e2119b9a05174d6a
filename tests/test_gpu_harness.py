"""`make gpu` on the CPU: imports, fixtures, measurements and the page of results."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu, gpu_results, gpu_site, tables
from benchmarks.gpu import Results, Step

_ROOT = Path(gpu.__file__).parents[1]


@pytest.mark.slow
def test_the_whole_run(tmp_path: Path) -> None:
    """Every step ends well, its results are on the page, and a second run has nothing to do."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--minutes", "20"]
    command += ["--results", str(tmp_path / "results.jsonl"), "--page", str(tmp_path / "gpu.md")]
    outputs = []
    for _ in range(2):
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    begun = re.findall(r"^(\w.*) \(at most", outputs[0], flags=re.MULTILINE)
    cases = {step.name.split()[0] for step in gpu.STEPS}
    assert {name.split()[0] for name in begun} == cases
    assert "(at most" not in outputs[1]
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    passed = {line["test"].partition("[")[0] for line in lines if line.get("outcome") == "passed"}
    served = {name.rpartition("::")[2] for name in passed if "test_server.py" in name}
    assert served == {
        "test_answers",
        "test_streams",
        "test_shared_weights",
        "test_killed_instance",
    }
    page = (tmp_path / "gpu.md").read_text()
    assert " 0 failed" in page
    for row in (
        "served ÷ loop | BERT-base, batch 2",
        "tritonserver ÷ loop | ResNet-50, batch 2",
        "latency, CUDA graphs ÷ eager | BERT-base, batch 1",
        "copy to the device ÷ pinned copy | 1 MiB",
        "weights of 4 instances ÷ of one | BERT-base, sharing true",
        "token steps ÷ loop | Llama, reduce-overhead, streams of 8 tokens",
        "compiled ÷ eager | ConvNeXt-T, batch 2, default",
        "throughput of a candidate of tune ÷ untuned | ResNet-50, eager, auto threads x 1",
    ):
        assert f"| {row} |" in page


def test_a_step_that_is_cut_off(tmp_path: Path) -> None:
    """A step that takes too long is run again by the next call; a failure is reported once."""
    results = Results(tmp_path / "results.jsonl", {"device": "cpu"})
    gpu.run(Step("copies", 0.01), "cpu", results)
    assert not results.ended("copies")
    gpu.run(Step("no-such-case", 60), "cpu", results)
    assert results.ended("no-such-case")
    again = Results(results.path, {"device": "cpu"})
    assert [(line["step"], line["end"]) for line in again.lines[1:]] == [
        ("copies", "time"),
        ("no-such-case", "exit code 2"),
    ]
    assert "invalid choice" in again.lines[2]["last lines"][-1]


def test_a_step_without_an_end_of_its_own(tmp_path: Path) -> None:
    """`tune` may measure until its time is up."""
    results = Results(tmp_path / "results.jsonl", {"device": "cpu"})
    gpu.run(Step("tune ResNet-50", 0.01), "cpu", results)
    assert results.lines[-1]["end"] == "ok"


_TESTS = """
import signal, time
import pytest
def test_first(): pass
def test_waits(monkeypatch): time.sleep(60)
def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(60)
def test_last(): pass
@pytest.mark.slow
def test_slow(): pass
"""


def test_tests_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fail with their stacks; what is left of the step's tests is run, each once."""
    plugin = Path(gpu_results.__file__).read_text()
    for name, seconds in (("_SECONDS", 1), ("_GRACE_S", 1)):
        plugin = re.sub(rf"^{name}\b.*", f"{name} = {seconds}", plugin, flags=re.MULTILINE)
    plugin += "\n_SLOW_SECONDS = 1\n"
    for name, text in (
        ("tests/gpu/test_gpu.py", _TESTS),
        ("benchmarks/gpu_results.py", plugin),
        ("benchmarks/gpu.py", Path(gpu.__file__).read_text()),
        ("benchmarks/tables.py", Path(tables.__file__).read_text()),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(gpu, "_ROOT", tmp_path)
    results = Results(tmp_path / "results.jsonl", {"device": "cpu"})
    assert gpu.run(Step("tests", 60), "cpu", results) == "crash"
    assert not results.ended("tests")
    assert gpu.run(Step("tests", 60), "cpu", results) == "ok"
    assert results.ended("tests")
    tests = [line for line in results.lines if "outcome" in line]
    outcomes = [(line["test"].rpartition("::")[2], line["outcome"]) for line in tests]
    assert outcomes == [
        ("test_first", "passed"),
        ("test_waits", "failed"),
        ("test_hangs", "failed"),
        ("test_last", "passed"),
    ]
    assert "not done after 1 s" in tests[1]["reason"]
    assert "in test_hangs" in tests[2]["reason"]
    again = Results(results.path, {"device": "cpu"}, ["tests"])
    assert gpu.unfinished(again.lines) == []
    assert {line["test"].rpartition("::")[2] for line in again.lines[1:]} == {
        "test_first",
        "test_last",
    }


_ENDLESS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print('{"figure": "of", "value": %d}' % child.pid, flush=True)
child.wait()
"""


def test_the_processes_of_a_step_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would hold the GPU; what the step has measured before is kept."""
    monkeypatch.setattr(gpu, "_ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "gpu_cases.py").write_text(_ENDLESS)
    results = Results(tmp_path / "results.jsonl", {})
    gpu.run(Step("endless", 3), "cuda", results)
    figure, end = results.lines[1:]
    assert end["end"] == "time"
    assert end["seconds"] < 30
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(figure["value"]).wait(timeout=30)


def test_half_a_line(tmp_path: Path) -> None:
    """What a run that was killed has not written to its end is dropped."""
    path = tmp_path / "results.jsonl"
    Results(path, {"device": "cpu"}).add({"step": "copies", "end": "ok", "seconds": 1.0})
    with path.open("a") as file:
        file.write('{"figure": "of')
    results = Results(path, {"device": "cpu"})
    results.add({"step": "served", "end": "ok", "seconds": 1.0})
    assert results.ended("copies")
    assert results.ended("served")


def test_python_with_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packages come before those of this Python, which are there, too."""
    package = tmp_path / "packed" / "numpy" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text("name = 'packed'")
    archive = tmp_path / "site.tar.xz"
    with tarfile.open(archive, "w:xz") as packed:
        packed.add(tmp_path / "packed", ".")
    monkeypatch.setattr(gpu, "_ARCHIVE", archive)
    monkeypatch.setattr(gpu, "_SITE", tmp_path / "gpu-site")
    for _ in range(2):
        command = [str(gpu.python()), "-c", "import numpy, pytest; print(numpy.name)"]
        assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == b"packed\n"


def test_stripped_site(tmp_path: Path) -> None:
    """The archive keeps the server with the stub for one Python, and the libraries it names."""
    files = {
        "pytriton/__init__.py": "import everything",
        "pytriton/client/grpc.py": "",
        "pytriton/tritonserver/bin/tritonserver": "libone.so",
        "pytriton/tritonserver/python_backend_stubs/3.12/stub": "libtwo.so",
        "pytriton/tritonserver/python_backend_stubs/3.13/stub": "libfour.so",
        "nvidia_pytriton.libs/libone.so": "libthree.so",
        "nvidia_pytriton.libs/libtwo.so": "",
        "nvidia_pytriton.libs/libthree.so": "",
        "nvidia_pytriton.libs/libfour.so": "",
        "numpy/core/tests/test_numpy.py": "",
        "numpy/core/numeric.py": "",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    gpu_site.strip(tmp_path, "3.12")
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert set(files) - left == {
        "pytriton/client/grpc.py",
        "pytriton/tritonserver/python_backend_stubs/3.13/stub",
        "nvidia_pytriton.libs/libfour.so",
        "numpy/core/tests/test_numpy.py",
    }
    assert (tmp_path / "pytriton" / "__init__.py").read_text() == ""
    with pytest.raises(SystemExit, match=r"no stub for Python 3.9; expected one of 3.12"):
        gpu_site.strip(tmp_path, "3.9")


_END = {"end": "ok", "seconds": 1.0}
_CODE = {"gpu": "one", "code of tests": "1", "code of measurements": "1"}


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, ["server", "copies"]),
        ({"code of tests": "2"}, ["copies"]),
        ({"code of measurements": "2"}, ["server"]),
        ({"gpu": "two"}, []),
    ],
    ids=["same", "tests", "measurements", "machine"],
)
def test_results_of_other_code(change: dict[str, str], kept: list[str], tmp_path: Path) -> None:
    """Results of another machine or of changed code are not counted; their file is kept."""
    path = tmp_path / "results.jsonl"
    results = Results(path, _CODE)
    for step in ("server", "copies"):
        results.add({"step": step, **_END})
    old = path.read_text()
    results = Results(path, _CODE | change)
    assert [step for step in ("server", "copies") if results.ended(step)] == kept
    assert json.loads(path.read_text().splitlines()[0]) == _CODE | change
    files = {file.name: file.read_text() for file in tmp_path.iterdir() if file != path}
    assert files == ({"results-1.jsonl": old} if change else {})


def test_a_step_again(tmp_path: Path) -> None:
    """A step that has failed is run again if it is named; tests that have passed are not."""
    path = tmp_path / "results.jsonl"
    results = Results(path, _CODE)
    for test, outcome in (("a", "passed"), ("b", "failed")):
        results.add({"step": "tests", "test": test})
        results.add({"step": "tests", "test": test, "outcome": outcome})
    for step in ("tests", "copies"):
        results.add({"step": step, "end": "exit code 1", "seconds": 1.0})
    assert Results(path, _CODE).ended("tests")
    again = Results(path, _CODE, ["tests"])
    assert not again.ended("tests")
    assert again.ended("copies")
    assert [line["test"] for line in again.lines if "test" in line] == ["a"]


def test_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of tests leaves measurements as they are, and the other way round."""
    monkeypatch.setattr(gpu, "_ROOT", tmp_path)
    changed = {}
    for name in (
        "src/pack/age.py",
        "tests/models.py",
        "tests/gpu/test_a.py",
        "benchmarks/gpu_cases.py",
    ):
        before = {key: gpu._digest(patterns) for key, patterns in gpu._CODE.items()}
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
        after = {key: gpu._digest(patterns) for key, patterns in gpu._CODE.items()}
        changed[name] = {key.rpartition(" ")[2] for key in before if before[key] != after[key]}
    assert changed == {
        "src/pack/age.py": {"tests", "measurements"},
        "tests/models.py": {"tests", "measurements"},
        "tests/gpu/test_a.py": {"tests"},
        "benchmarks/gpu_cases.py": {"measurements"},
    }


def test_what_a_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named before the steps; the driver gets the other name that it is looked for by."""
    monkeypatch.setattr(gpu, "_LINKS", tmp_path / "links")
    monkeypatch.setattr(gpu, "_loads", lambda library: library == "libcuda.so.1")
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 17  /usr/lib/libcuda.so.580.65\n")
    monkeypatch.setattr(gpu, "_MAPS", maps)
    monkeypatch.setattr(gpu, "_TOOLKIT", tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/some")
    monkeypatch.setenv("LIBRARY_PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    gpu.prepare("cuda")
    lines = capsys.readouterr().out.splitlines()
    for line, name in zip(lines, ("libpython3", "libcuda.so,", "nvcc"), strict=True):
        assert name in line
    assert (tmp_path / "links" / "libcuda.so").readlink() == Path("/usr/lib/libcuda.so.580.65")
    assert os.environ["LD_LIBRARY_PATH"] == f"{tmp_path}/links:/some"
    assert os.environ["LIBRARY_PATH"] == f"{tmp_path}/links"
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").touch()
    gpu.prepare("cuda")
    assert os.environ["CUDA_HOME"] == str(tmp_path)


def test_calls() -> None:
    """Five calls of eight minutes suffice if every step takes its full time."""
    calls, left = 1, 480.0
    for step in gpu.STEPS:
        if step.seconds > left:
            calls, left = calls + 1, 480.0
        left -= step.seconds
    assert calls == 5


def test_failed_tests_are_on_the_page() -> None:
    """The page names what failed with its first lines, and why tests were skipped."""
    text = gpu.page(
        [
            {"device": "cuda", "gpu": "one"},
            {"test": "tests/gpu/test_gpu.py::test_a", "outcome": "failed", "reason": "E  1 == 2"},
            {"test": "tests/gpu/test_gpu.py::test_b", "outcome": "skipped", "reason": "two GPUs"},
            {"test": "tests/gpu/test_gpu.py::test_c"},
            {"test": "tests/gpu/test_gpu.py::test_c", "outcome": "passed"},
            {"test": "tests/gpu/test_gpu.py::test_d"},
            {"figure": "copy", "of": "1 MiB", "value": 0.9, "least": 0.8, "most": 1.0},
            {"figure": "served", "of": "net", "value": 0.9, "at least": 0.95},
            {"figure": "latency", "of": "net", "value": 0.4, "at most": 0.5},
        ]
    )
    assert "1 passed, 1 failed, 1 skipped" in text
    assert "`tests/gpu/test_gpu.py::test_a`\n\n```text\nE  1 == 2\n```" in text
    assert "two GPUs" in text
    assert "`tests/gpu/test_gpu.py::test_d` has begun, and has not ended." in text
    assert "| copy | 1 MiB | 0.90 (0.80..1.00) |  |  |" in text
    assert "| served | net | 0.90 | at least 0.95, missed |  |" in text
    assert "| latency | net | 0.40 | at most 0.5, reached |  |" in text
    assert "Not run yet: tests, tests slow, server, served ResNet-50" in text
