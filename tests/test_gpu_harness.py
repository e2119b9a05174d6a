"""`make gpu` on the CPU: imports, fixtures, measurements and the page of results."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu, gpu_site
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


def test_results_of_other_code_are_dropped(tmp_path: Path) -> None:
    """Results of another machine or of changed code begin anew."""
    path = tmp_path / "results.jsonl"
    Results(path, {"code": "1"}).add({"step": "served", "end": "ok", "seconds": 1.0})
    assert Results(path, {"code": "1"}).ended("served")
    assert not Results(path, {"code": "2"}).ended("served")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"code": "2"}]


def test_failed_tests_are_on_the_page() -> None:
    """The page names what failed with its first lines, and why tests were skipped."""
    text = gpu.page(
        [
            {"device": "cuda", "gpu": "one"},
            {"test": "tests/gpu/test_gpu.py::test_a", "outcome": "failed", "reason": "E  1 == 2"},
            {"test": "tests/gpu/test_gpu.py::test_b", "outcome": "skipped", "reason": "two GPUs"},
            {"test": "tests/gpu/test_gpu.py::test_c", "outcome": "passed"},
            {"figure": "copy", "of": "1 MiB", "value": 0.9, "least": 0.8, "most": 1.0},
            {"figure": "served", "of": "net", "value": 0.9, "at least": 0.95},
            {"figure": "latency", "of": "net", "value": 0.4, "at most": 0.5},
        ]
    )
    assert "1 passed, 1 failed, 1 skipped" in text
    assert "`tests/gpu/test_gpu.py::test_a`\n\n```text\nE  1 == 2\n```" in text
    assert "two GPUs" in text
    assert "| copy | 1 MiB | 0.90 (0.80..1.00) |  |  |" in text
    assert "| served | net | 0.90 | at least 0.95, missed |  |" in text
    assert "| latency | net | 0.40 | at most 0.5, reached |  |" in text
    assert "Not run yet: tests, server, served ResNet-50" in text
