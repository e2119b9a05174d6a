"""Fixtures that the whole suite shares."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from fixtures import dynamo, here, imports, no_collector, process
from xdist.scheduler import LoadScopeScheduling

from torch_py_backend.processes import private_files

__all__ = ["dynamo", "here", "imports", "no_collector", "process"]

# The same examples in every run, no time limit of its own: pytest's ends what hangs.
hypothesis.settings.register_profile(
    "suite", derandomize=True, deadline=None, database=None, max_examples=60
)
hypothesis.settings.register_profile(
    "fuzz", deadline=None, max_examples=int(os.environ.get("FUZZ_EXAMPLES", "1"))
)
hypothesis.settings.load_profile("suite")

# Inductor builds a library and starts a process to try what the processor says it has.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Packages are compiled faster, and run slower.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")

# In tests/live/: those that wait rather than compute.
_COMMANDS = ("faults/", "test_serve")


class _Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """Whole files. Those with real servers in two processes: one for commands that start them.

    Each in turn: the models of more servers would not fit into a small machine's memory.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        _, folder, name = file.rpartition("tests/live/")
        if not folder:
            return file
        return "commands" if name.startswith(_COMMANDS) else "servers"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """What hands out the tests where there are several processes (`make test`)."""
    return _Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def server_of_its_own() -> Iterator[None]:
    """Give each process its own server folder: all processes of a run have the same parent."""
    name = private_files.server_name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_files, "server_name", lambda _parent: f"{name(os.getpid())}-itself")
        yield


@pytest.fixture(scope="module", autouse=True)
def young_objects() -> None:
    """Collections look at what this file's tests make, not at all that was ever imported.

    A model collects as it starts, and a look at a million objects takes half a second.
    """
    gc.collect()
    gc.freeze()
