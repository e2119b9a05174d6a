"""Prove this package on a machine with a GPU: its tests, then measurements, in eight minutes.

    python -m benchmarks.gpu [--device cuda] [--results FILE] [--page FILE]

needs torch, numpy, safetensors and pytest, and no network. Each result is written as soon as it is
known, as a line of JSON. A second call continues where the first was cut off, unless the code has
changed since. `make gpu-site` packs what a bare machine lacks, a tritonserver among it, into
an archive for one version of Python; it is unpacked into gpu-site/, a virtual environment with this
Python's torch. Without it, the tests of a server are skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
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


class Step(NamedTuple):
    """A process of the run.

    Attributes:
        name: `tests`, `server`, or a case of `benchmarks.gpu_cases`.
        seconds: its time limit.
    """

    name: str
    seconds: float


# In the order of importance; together eight minutes.
STEPS = (
    Step("tests", 140),
    Step("server", 90),
    Step("served", 60),
    Step("graphs", 30),
    Step("copies", 20),
    Step("memory", 40),
    Step("compiled", 100),
)

_ABOUT = """\
Made by `make gpu` on one machine. The tests in `test_server.py` run a tritonserver; the others, and
the measurements, use the fake of Triton's utilities."""

Line: TypeAlias = dict[str, Any]


class Results:
    """The file of results: a line for the machine, then one for each result and each step."""

    def __init__(self, path: Path, machine: Mapping[str, object]) -> None:
        self.path = path
        self.lines: list[Line] = []
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines()]
        if not self.lines or self.lines[0] != machine:
            path.unlink(missing_ok=True)
            self.lines = []
            self.add(machine)

    def add(self, line: Mapping[str, object]) -> None:
        self.lines.append(dict(line))
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def ended(self, step: str) -> bool:
        """Return whether a step has run to its end."""
        return any(line.get("step") == step and line["end"] != "time" for line in self.lines)

    def reload(self) -> None:
        """Read the lines that the process of a step has written."""
        self.lines = [json.loads(line) for line in self.path.read_text().splitlines()]


def machine(device: str) -> Line:
    """Return what the results depend on: the device, versions, and a digest of the code."""
    import torch  # noqa: PLC0415  `--help` needs none

    digest = hashlib.sha256()
    for folder in ("src", "benchmarks", _TESTS):
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    line: Line = {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "code": digest.hexdigest()[:12],
    }
    if device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(
                f"torch {torch.__version__} sees no GPU. Use a torch built for this machine's CUDA"
                " driver, or --device cpu, which only tries the program."
            )
        gpu = torch.cuda.get_device_properties(0)
        line |= {
            "gpu": gpu.name,
            "memory, GiB": round(gpu.total_memory / (1 << 30), 1),
            "CUDA": torch.version.cuda,
            "GPUs": torch.cuda.device_count(),
            "driver": _driver(),
        }
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
    """Run a step in a process; write how it ended."""
    environment = os.environ | {
        "GPU_RESULTS": str(results.path),
        "GPU_DEVICE": device,
        "PYTHONPATH": os.pathsep.join(str(_ROOT / name) for name in _PATHS),
    }
    if step.name in _TEST_FILES:
        # Not the settings of pyproject.toml: they need more plugins than this machine may have.
        command = ["-m", "pytest", "-q", _TEST_FILES[step.name]]
        command += ["-c", os.devnull, "--rootdir", str(_ROOT)]
        command += ["-p", "benchmarks.gpu_results", "-p", "no:cacheprovider", "--tb=short"]
        command += ["--import-mode=importlib", f"--confcutdir={_TESTS}"]
    else:
        command = ["-m", "benchmarks.gpu_cases", step.name, "--device", device]
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
    )
    output = ""
    try:
        output, _ = process.communicate(timeout=step.seconds)
        end = "ok" if process.returncode == 0 else f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        end = "time"
    results.reload()
    for line in output.splitlines():
        if step.name not in _TEST_FILES and line.startswith('{"figure"'):
            results.add(json.loads(line))
        else:
            print(f"  {line}", flush=True)
    seconds = round(time.monotonic() - began, 1)
    tail = [] if end == "ok" else output.splitlines()[-3:]
    results.add({"step": step.name, "end": end, "seconds": seconds, "last lines": tail})


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
        _ABOUT,
        markdown(("machine", ""), list(first.items())),
        f"## Tests\n\n{counts}.",
    ]
    failed = [(name, line["reason"]) for name, line in tests.items() if line["outcome"] == "failed"]
    parts += [f"`{name}`\n\n```text\n{reason}\n```" for name, reason in failed]
    reasons = sorted({line["reason"] for line in tests.values() if line["outcome"] == "skipped"})
    parts += ["Reasons of skipped tests: " + "; ".join(reasons) + "."] if reasons else []
    figures = [line for line in rest if "figure" in line]
    measured = [
        (line["figure"], line["of"], _value(line), _rates(line))
        for line in figures
        if "value" in line
    ]
    if measured:
        columns = ("figure", "of", "median (least..most)", "per second")
        parts += ["## Measurements", markdown(columns, measured)]
    parts += [f"{line['figure']}: {line['reason']}." for line in figures if "reason" in line]
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


def _rates(line: Line) -> str:
    rates = line.get("per second", {})
    return ", ".join(f"{name} {value:,.1f}" for name, value in rates.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--results", default=Path("gpu-results.jsonl"), type=Path)
    parser.add_argument("--page", default=Path("gpu.md"), type=Path)
    parser.add_argument("--minutes", default=8.0, type=float)
    parser.add_argument("--steps", default=",".join(step.name for step in STEPS))
    arguments = parser.parse_args()
    results = Results(arguments.results.resolve(), machine(arguments.device))
    deadline = time.monotonic() + 60 * arguments.minutes
    wanted = arguments.steps.split(",")
    for step in STEPS:
        left = deadline - time.monotonic()
        if step.name not in wanted or results.ended(step.name):
            continue
        if left < 1:
            break
        # A trial on a CPU, which has other work, is to end, not to be fast.
        limit = step.seconds * (1 if arguments.device == "cuda" else 4)
        run(step._replace(seconds=min(limit, left)), arguments.device, results)
        arguments.page.write_text(page(results.lines))
    arguments.page.write_text(page(results.lines))
    print(f"{arguments.page}: {results.path}")
    bad = [line for line in results.lines if line.get("outcome") == "failed"]
    bad += [line for line in results.lines if line.get("step") and line["end"] != "ok"]
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
