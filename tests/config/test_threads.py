import os
from pathlib import Path
from typing import Any

import build
import pytest

from torch_py_backend.config import threads
from torch_py_backend.config.threads import Threads

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set eight cores and no thread settings in the environment; restore both afterwards."""
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def write(cgroup: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (cgroup / name).parent.mkdir(exist_ok=True)
        (cgroup / name).write_text(text, encoding="ascii")
    return cgroup


def v1(quota: str, period: str = "100000") -> dict[str, str]:
    return {"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu.max": "100000\n"}, 8),
        (v1("-1"), 8),
        (v1("300000"), 3),
        (v1("10000"), 1),
        ({"cpu/cpu.cfs_quota_us": "300000\n"}, 8),
        ({"cpu.max": "400000 100000\n"} | v1("300000"), 4),
        ({"cpu.max": "max 100000\n"} | v1("300000"), 3),
    ],
)
def test_quota(files: dict[str, str], cores: int, tmp_path: Path) -> None:
    """The container's quota limits the number of cores; it is at least one."""
    assert threads.available_cores(write(tmp_path, files)) == cores


def test_affinity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CPU affinity limits the number of cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5})

    assert threads.available_cores(tmp_path) == 2
    assert threads.available_cores(write(tmp_path, {"cpu.max": "500000 100000"})) == 2


@pytest.mark.parametrize(
    ("options", "instances", "variable", "expected"),
    [
        ({}, 1, "", Threads(8, 8)),
        ({}, 3, "", Threads(2, 2)),
        ({}, 20, "", Threads(1, 1)),
        ({"num_threads": 5}, 4, "", Threads(5, 2)),
        ({"num_interop_threads": 5}, 4, "", Threads(2, 5)),
        ({"num_threads": 5}, 2, "3", Threads(5, 4)),
        *(({}, 2, variable, Threads(4, 4)) for variable in ("0", "many", "-1", "4,2")),
        ({}, 2, "3", Threads(3, 4)),
    ],
)
def test_budget(
    options: dict[str, Any],
    instances: int,
    variable: str,
    expected: Threads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Instances share the cores equally unless the config or the environment sets counts."""
    monkeypatch.setattr(threads, "available_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)

    assert threads.budget(build.config(instances=instances, **options)) == expected


def test_environment() -> None:
    """set_environment() sets the variables of OpenMP and MKL."""
    threads.set_environment(Threads(intra_op=3, inter_op=7))

    assert {variable: os.environ[variable] for variable in VARIABLES} == dict.fromkeys(
        VARIABLES, "3"
    )
