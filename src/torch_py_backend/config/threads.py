"""The number of threads of an instance; set before torch is imported, which reads it once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torch_py_backend.config.model_config import ModelConfig

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Threads:
    """Numbers of threads: within one operator, and for operators that run in parallel."""

    intra_op: int
    inter_op: int


def budget(config: ModelConfig) -> Threads:
    """Return the counts of the config, or an equal share of the cores for each instance."""
    share = max(1, available_cores() // config.instances)
    variable = os.environ.get("OMP_NUM_THREADS", "")
    omp_threads = int(variable) if variable.isdecimal() else 0
    return Threads(
        intra_op=config.options.num_threads or omp_threads or share,
        inter_op=config.options.num_interop_threads or share,
    )


def set_environment(threads: Threads) -> None:
    """Set the thread count of OpenMP and MKL in the environment, which they read once."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads.intra_op)


def available_cores(cgroup: Path = _CGROUP) -> int:
    """Return the number of cores that CPU affinity and the container's quota allow."""
    allowed = len(os.sched_getaffinity(0))
    quota = _quota_v2(cgroup) or _quota_v1(cgroup)
    return max(1, min(allowed, int(quota))) if quota else allowed


def _quota_v2(cgroup: Path) -> float | None:
    words = _words(cgroup / "cpu.max")
    if len(words) != 2 or words[0] == "max":  # noqa: PLR2004  "<quota> <period>", see cgroup-v2
        return None
    return int(words[0]) / int(words[1])


def _quota_v1(cgroup: Path) -> float | None:
    quota = _words(cgroup / "cpu" / "cpu.cfs_quota_us")
    period = _words(cgroup / "cpu" / "cpu.cfs_period_us")
    if not quota or not period or int(quota[0]) <= 0:
        return None
    return int(quota[0]) / int(period[0])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
