import os
from pathlib import Path
from typing import Any

import build
import pytest

from torch_py_backend.config import threads
from torch_py_backend.config.threads import Threads


def v1(quota: str) -> dict[str, str]:
    return {"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "allowed", "cores"),
    [
        ({}, 8, 8),
        ({"cpu.max": "max 100000\n"}, 8, 8),
        ({"cpu.max": "250000 100000\n"}, 8, 2),
        ({"cpu.max": "50000 100000\n"}, 8, 1),
        ({"cpu.max": "500000 100000\n"}, 2, 2),
        (v1("-1"), 8, 8),
        (v1("300000"), 8, 3),
    ],
)
def test_affinity_and_quota_limit_the_cores(
    files: dict[str, str], allowed: int, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    assert threads.available_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("settings", "variable", "expected"),
    [
        ({"instances": 3}, "", Threads(2, 2)),
        ({"instances": 20}, "", Threads(1, 1)),
        ({"instances": 4, "num_interop_threads": 5}, "", Threads(2, 5)),
        ({"instances": 2, "num_threads": 5}, "3", Threads(5, 4)),
        ({"instances": 2}, "4,2", Threads(4, 4)),
        ({"instances": 2}, "3", Threads(3, 4)),
    ],
)
def test_instances_share_the_cores_unless_counts_are_set(
    settings: dict[str, Any], variable: str, expected: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "available_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert threads.budget(build.config(**settings)) == expected


@pytest.mark.parametrize(
    ("own", "count"),
    [({}, "4000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_openmp_s_variables_are_set_and_a_user_s_kept(
    own: dict[str, str], count: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", own)
    threads.set_environment(Threads(intra_op=3, inter_op=7))
    assert own["OMP_NUM_THREADS"] == own["MKL_NUM_THREADS"] == "3"
    assert own.get("GOMP_SPINCOUNT") == count
