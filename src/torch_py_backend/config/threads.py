"""The number of threads of an instance; set before torch is imported, which reads it once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from torch_py_backend.config.model_config import ModelConfig


class Threads(NamedTuple):
    """Numbers of threads: within one operator, and of operators in parallel."""

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
    """Set the variables of OpenMP and MKL, which they read once.

    By default, waiting threads of PyTorch's OpenMP spin for milliseconds on a core. If another
    instance needs it, an operator takes several times as long. They sleep after microseconds here.
    """
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads.intra_op)
    if "OMP_WAIT_POLICY" not in os.environ:  # another way for a user to set it
        os.environ.setdefault("GOMP_SPINCOUNT", "4000")


def available_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that CPU affinity and the container's quota allow."""
    allowed = len(os.sched_getaffinity(0))
    # cgroup v2 has "<quota> <period>" in one file, v1 two files; no quota is "max", or -1.
    files = ("cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    texts = [(cgroup / file).read_text() for file in files if (cgroup / file).is_file()]
    quota, *period = " ".join(texts).split() or ["max"]
    return max(1, min(allowed, int(quota) // int(period[0]))) if quota.isdecimal() else allowed
