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


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        pytest.param({}, 8, id="no cgroup"),
        pytest.param({"cpu.max": "max 100000\n"}, 8, id="v2 without a quota"),
        pytest.param({"cpu.max": "200000 100000\n"}, 2, id="v2 two cores"),
        pytest.param({"cpu.max": "250000 100000\n"}, 2, id="v2 two cores and a half"),
        pytest.param({"cpu.max": "50000 100000\n"}, 1, id="v2 half a core"),
        pytest.param({"cpu.max": "6400000 100000\n"}, 8, id="v2 more than there are"),
        pytest.param({"cpu.max": ""}, 8, id="v2 empty"),
        pytest.param({"cpu.max": "100000\n"}, 8, id="v2 without a period"),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            8,
            id="v1 without a quota",
        ),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            3,
            id="v1 three cores",
        ),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "10000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            1,
            id="v1 a tenth of a core",
        ),
        pytest.param({"cpu/cpu.cfs_quota_us": "300000\n"}, 8, id="v1 without a period"),
        pytest.param({"cpu/cpu.cfs_period_us": "100000\n"}, 8, id="v1 with a period alone"),
        pytest.param(
            {
                "cpu.max": "400000 100000\n",
                "cpu/cpu.cfs_quota_us": "300000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
            id="both: v2 counts",
        ),
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
        pytest.param({}, 1, "", Threads(8, 8), id="alone"),
        pytest.param({}, 3, "", Threads(2, 2), id="an equal share"),
        pytest.param({}, 20, "", Threads(1, 1), id="more instances than cores"),
        pytest.param({"num_threads": 5}, 4, "", Threads(5, 2), id="intra-op from the config"),
        pytest.param(
            {"num_interop_threads": 5}, 4, "", Threads(2, 5), id="inter-op from the config"
        ),
        pytest.param({}, 2, "3", Threads(3, 4), id="OMP_NUM_THREADS"),
        pytest.param({"num_threads": 5}, 2, "3", Threads(5, 4), id="config before environment"),
        pytest.param({}, 2, "0", Threads(4, 4), id="OMP_NUM_THREADS of 0"),
        pytest.param({}, 2, "many", Threads(4, 4), id="OMP_NUM_THREADS no number"),
        pytest.param({}, 2, "-1", Threads(4, 4), id="OMP_NUM_THREADS negative"),
        pytest.param({}, 2, "4,2", Threads(4, 4), id="OMP_NUM_THREADS a list"),
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


def test_budget_without_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OMP_NUM_THREADS the budget is the share of the cores."""
    monkeypatch.setattr(threads, "available_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS")

    assert threads.budget(build.config(instances=2)) == Threads(3, 3)


def test_reserve() -> None:
    """reserve() sets the variables of OpenMP and MKL."""
    threads.set_environment(Threads(intra_op=3, inter_op=7))

    assert {variable: os.environ[variable] for variable in VARIABLES} == dict.fromkeys(
        VARIABLES, "3"
    )
