"""Prove this package on a machine with a GPU: its tests, then measurements, eight minutes a call.

    python -m benchmarks.gpu [--device cuda] [--results FILE] [--page FILE]

needs torch, numpy, safetensors and pytest (`tune` also psutil), and no network. Each result is
written as soon as it is known, as a line of JSON. The next call continues where the last one ended,
unless the code has changed since. `make gpu-site` packs what a bare machine lacks, a tritonserver
among it, into an archive for one version of Python; it is unpacked into gpu-site/, a virtual
environment with this Python's torch. Without it, the tests that need clients or a server are
skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import venv
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from benchmarks.tables import markdown

_ROOT = Path(__file__).parents[1]
_TESTS = "tests/gpu"
# The steps that are tests, with their files.
_TEST_FILES = {"tests": f"{_TESTS}/test_gpu.py", "server": f"{_TESTS}/test_server.py"}
_SITE = _ROOT / "gpu-site"
_ARCHIVE = _ROOT / f"gpu-site-{sys.version_info.major}.{sys.version_info.minor}.tar.xz"
_PATHS = ("src", "tests", ".")
_LAST_LINES = 3  # of a step that failed
_READ_S = 5.0  # for the last lines of a process that has ended


class Step(NamedTuple):
    """A process of the run.

    Attributes:
        name: `tests`, `server`, or a case of `benchmarks.gpu_cases` with what it measures.
        seconds: its time limit.
    """

    name: str
    seconds: float


# In the order of importance. The first call comes to the first compiled model.
STEPS = (
    Step("tests", 140),
    Step("server", 90),
    Step("served ResNet-50", 25),
    Step("served BERT-base", 25),
    Step("tritonserver ResNet-50", 45),
    Step("graphs BERT-base", 25),
    Step("copies", 20),
    Step("memory BERT-base", 60),
    Step("compiled ResNet-50 default", 80),
    # In a second call.
    Step("served ViT-B", 25),
    Step("tokens Llama reduce-overhead", 90),
    Step("graphs ResNet-50", 25),
    Step("compiled ViT-S default", 80),
    Step("compiled ConvNeXt-T default", 80),
    Step("compiled ResNet-50 reduce-overhead", 80),
    Step("compiled ViT-S reduce-overhead", 80),
    Step("compiled ConvNeXt-T reduce-overhead", 80),
    Step("tune ResNet-50", 160),
    # In a third one.
    Step("compiled ResNet-50 max-autotune", 160),
    Step("compiled ViT-S max-autotune", 120),
    Step("compiled ConvNeXt-T max-autotune", 160),
)
# With --device cpu, one of each kind.
_TRIED = (
    "tests",
    "server",
    "served BERT-base",
    "tritonserver ResNet-50",
    "graphs BERT-base",
    "copies",
    "memory BERT-base",
    "tokens Llama reduce-overhead",
    "compiled ConvNeXt-T default",
    "tune ResNet-50",
)

_ABOUT = """\
Made by `make gpu` on one machine. The tests in `test_server.py` run a tritonserver; the others, and
the measurements, use the fake of Triton's utilities."""

Line: TypeAlias = dict[str, Any]


class Results:
    """The file of results: a line for the machine, then one for each result and each step."""

    def __init__(self, path: Path, machine: Mapping[str, object]) -> None:
        self.path = path
        self.lines = read(path)
        if not self.lines or self.lines[0] != machine:
            self.lines = [dict(machine)]
        # Without the half of a line that a run may have left.
        path.write_text("".join(f"{json.dumps(line)}\n" for line in self.lines))

    def add(self, line: Mapping[str, object]) -> None:
        with self.path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")
        self.lines = read(self.path)  # with those of the process of a step

    def ended(self, step: str) -> bool:
        """Return whether a step has run to its end."""
        return any(line.get("step") == step and line["end"] != "time" for line in self.lines)


def read(path: Path) -> list[Line]:
    """Return the lines of a file of results, without one that was not written to its end."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


# In a process of its own, which ends: on a GPU in exclusive mode a step could not start beside it.
_TELL = """
import json, torch
line = {"torch": torch.__version__}
if torch.cuda.is_available():
    gpu = torch.cuda.get_device_properties(0)
    memory = round(gpu.total_memory / (1 << 30), 1)
    line |= {"gpu": gpu.name, "memory, GiB": memory, "GPUs": torch.cuda.device_count()}
    line["CUDA"] = torch.version.cuda
print(json.dumps(line))
"""


def machine(device: str) -> Line:
    """Return what the results depend on: the device, versions, and a digest of the code."""
    digest = hashlib.sha256()
    for folder in ("src", "benchmarks", _TESTS):
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    told = subprocess.run([sys.executable, "-c", _TELL], stdout=subprocess.PIPE, check=True)  # noqa: S603
    line: Line = {
        "device": device,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "code": digest.hexdigest()[:12],
    } | json.loads(told.stdout)
    if device == "cuda":
        if "gpu" not in line:
            raise SystemExit(
                f"torch {line['torch']} sees no GPU. Use a torch built for this machine's CUDA"
                " driver, or --device cpu, which only tries the program."
            )
        line["driver"] = _driver()
    return line


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)  # noqa: S603
        return done.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def python() -> Path:
    """Return the Python of the steps; with an archive, that of a virtual environment with it.

    Triton's stub reads no PYTHONPATH, so the archive goes where Python looks for packages.
    """
    if not _ARCHIVE.exists():
        return Path(sys.executable)
    if not _SITE.exists():
        # Under another name first: a run that is cut off here leaves no half of it.
        part = _SITE.with_name("gpu-site.part")
        venv.create(part, symlinks=True, clear=True)
        (packages,) = part.glob("lib/python*/site-packages")
        shutil.unpack_archive(_ARCHIVE, packages)
        others = [path for path in sys.path if path.endswith("-packages")]
        (packages / "machine.pth").write_text("\n".join(others))
        part.rename(_SITE)
    return _SITE / "bin" / "python3"


def run(step: Step, device: str, results: Results) -> None:
    """Run a step in a process; write each of its figures at once, then how it ended."""
    environment = os.environ | {
        "GPU_RESULTS": str(results.path),
        "GPU_DEVICE": device,
        "PYTHONPATH": os.pathsep.join(str(_ROOT / name) for name in _PATHS),
    }
    if step.name in _TEST_FILES:
        # Not the settings of pyproject.toml: they need more plugins than this machine may have.
        command = ["-m", "pytest", "-q", _TEST_FILES[step.name]]
        command += ["-c", os.devnull, "--rootdir", str(_ROOT)]
        command += ["-p", "benchmarks.gpu_results", "-p", "no:cacheprovider", "-p", "no:warnings"]
        command += ["--import-mode=importlib", f"--confcutdir={_TESTS}", "--tb=short"]
    else:
        command = ["-m", "benchmarks.gpu_cases", *step.name.split(), "--device", device]
        command += ["--small"] if device == "cpu" else []
    began = time.monotonic()
    print(f"{step.name} (at most {step.seconds:.0f} s)", flush=True)
    process = subprocess.Popen(  # noqa: S603  our own modules
        [python(), *command],
        cwd=_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    tail: deque[str] = deque(maxlen=_LAST_LINES)
    reader = threading.Thread(target=_record, args=(process, results, tail), daemon=True)
    reader.start()
    try:
        process.wait(step.seconds)
        end = "ok" if process.returncode == 0 else f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        end = "time"
    with contextlib.suppress(ProcessLookupError):  # the processes that it has started, too
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join(_READ_S)
    seconds = round(time.monotonic() - began, 1)
    last = [] if end == "ok" else list(tail)
    results.add({"step": step.name, "end": end, "seconds": seconds, "last lines": last})


def _record(process: subprocess.Popen[str], results: Results, tail: deque[str]) -> None:
    """Add the figures that a step prints to the results, and print its other lines."""
    assert process.stdout is not None  # noqa: S101  it is a pipe
    with process.stdout as lines:
        for line in lines:
            if line.startswith('{"figure"'):
                results.add(json.loads(line))
            else:
                tail.append(line.rstrip())
                print(f"  {line}", end="", flush=True)


def page(lines: Iterable[Line]) -> str:
    """Return the results as a Markdown page."""
    first, *rest = lines
    tests = {line["test"]: line for line in rest if "test" in line}
    outcomes = [line["outcome"] for line in tests.values()]
    counts = ", ".join(
        f"{outcomes.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped")
    )
    parts = [
        "# On a GPU",
        _ABOUT if first["device"] == "cuda" else f"{_ABOUT} On a CPU, its figures mean nothing.",
        markdown(("machine", ""), list(first.items())),
        f"## Tests\n\n{counts}.",
    ]
    failed = [(name, line["reason"]) for name, line in tests.items() if line["outcome"] == "failed"]
    parts += [f"`{name}`\n\n```text\n{reason}\n```" for name, reason in failed]
    reasons = sorted({line["reason"] for line in tests.values() if line["outcome"] == "skipped"})
    parts += ["Reasons of skipped tests: " + "; ".join(reasons) + "."] if reasons else []
    figures = [line for line in rest if "figure" in line]
    if figures:
        measured = [
            (line["figure"], line["of"], _value(line), _aim(line), _rates(line)) for line in figures
        ]
        columns = ("figure", "of", "median (least..most)", "aim", "per second")
        parts += ["## Measurements", markdown(columns, measured)]
    if left := [
        step.name for step in STEPS if not any(step.name == one.get("step") for one in rest)
    ]:
        parts.append(f"Not run yet: {', '.join(left)}.")
    steps = [
        (line["step"], line["end"], line["seconds"], " ".join(line["last lines"]))
        for line in rest
        if "step" in line
    ]
    parts += ["## Steps", markdown(("step", "end", "seconds", "last lines"), steps)]
    return "\n\n".join(parts) + "\n"


def _value(line: Line) -> str:
    spread = f" ({line['least']:.2f}..{line['most']:.2f})" if "least" in line else ""
    return f"{line['value']:.2f}{spread}"


def _aim(line: Line) -> str:
    least, most = line.get("at least"), line.get("at most")
    if least is not None:
        return f"at least {least}, {'reached' if line['value'] >= least else 'missed'}"
    if most is not None:
        return f"at most {most}, {'reached' if line['value'] <= most else 'missed'}"
    return ""


def _rates(line: Line) -> str:
    rates = line.get("per second", {})
    return ", ".join(f"{name} {value:,.1f}" for name, value in rates.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--results", default=Path("gpu-results.jsonl"), type=Path)
    parser.add_argument("--page", type=Path, help="by default docs/gpu.md, of a CPU gpu.md")
    parser.add_argument("--minutes", default=8.0, type=float)
    arguments = parser.parse_args()
    results = Results(arguments.results.resolve(), machine(arguments.device))
    deadline = time.monotonic() + 60 * arguments.minutes
    on_gpu = arguments.device == "cuda"
    path = arguments.page or Path("docs/gpu.md" if on_gpu else "gpu.md")
    steps = [step for step in STEPS if on_gpu or step.name in _TRIED]
    left = [step for step in steps if not results.ended(step.name)]
    while left and time.monotonic() + left[0].seconds <= deadline:
        step = left.pop(0)
        # A trial on a CPU, which has other work, is to end, not to be fast.
        run(step._replace(seconds=step.seconds * (1 if on_gpu else 4)), arguments.device, results)
        path.write_text(page(results.lines))
    path.write_text(page(results.lines))
    print(f"{path}: {results.path}")
    if left:
        print(f"left for the next call: {', '.join(step.name for step in left)}")
    bad = [line for line in results.lines if line.get("outcome") == "failed"]
    bad += [line for line in results.lines if line.get("step") and line["end"] != "ok"]
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
