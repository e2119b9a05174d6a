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
    """Eight cores, and no word on threads in the environment; both as before afterwards."""
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
def test_cores_are_cut_by_the_containers_quota(
    files: dict[str, str], cores: int, tmp_path: Path
) -> None:
    """A container's share of the machine counts, not the machine; never less than one core."""
    assert threads.cores(write(tmp_path, files)) == cores


def test_cores_are_those_of_the_affinity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process pinned to some cores counts those, whatever the quota allows."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5})

    assert threads.cores(tmp_path) == 2
    assert threads.cores(write(tmp_path, {"cpu.max": "500000 100000"})) == 2


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
def test_budget_is_the_configs_or_an_equal_share(
    options: dict[str, Any],
    instances: int,
    variable: str,
    expected: Threads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Instances share the cores fairly unless the config, or the environment, says otherwise."""
    monkeypatch.setattr(threads, "cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)

    assert threads.budget(build.config(instances=instances, **options)) == expected


def test_environment_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OMP_NUM_THREADS the share is what the cores give."""
    monkeypatch.setattr(threads, "cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS")

    assert threads.budget(build.config(instances=2)) == Threads(3, 3)


def test_reserve_tells_openmp_and_mkl() -> None:
    """The budget stands in the environment before torch reads it."""
    threads.reserve(Threads(intra_op=3, inter_op=7))

    assert {variable: os.environ[variable] for variable in VARIABLES} == dict.fromkeys(
        VARIABLES, "3"
    )
