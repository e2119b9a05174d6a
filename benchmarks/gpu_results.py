"""A pytest plugin: append what begins and its outcome to the file in GPU_RESULTS, as it is known.

Tests of which the file has the outcome are not run again. A test that takes too long fails; where
it waits outside Python, the process ends with its stack, and the next one runs the other tests.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import gpu

_FIRST_LINES = 5
_SECONDS, _SLOW_SECONDS = 60, 180  # of a test
_GRACE_S = 15  # for one that has failed to end
_STDERR = os.dup(2)  # pytest captures that of the tests


def _add(line: dict[str, object]) -> None:
    with Path(os.environ["GPU_RESULTS"]).open("a") as file:
        file.write(json.dumps({"step": os.environ["GPU_STEP"]} | line) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests with an outcome."""
    lines = gpu.latest(gpu.read(Path(os.environ["GPU_RESULTS"])), "test")
    known = {line["test"] for line in lines if "outcome" in line}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
    items[:] = [item for item in items if item.nodeid not in known]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write that a test begins, and limit its time."""
    _add({"test": item.nodeid})
    # Triton 24.10 may have to be started twice, see tests/serving.py.
    is_slow = any(map(item.get_closest_marker, ("slow", "server")))
    seconds = _SLOW_SECONDS if is_slow else _SECONDS

    def fail(*_: object) -> None:
        pytest.fail(f"not done after {seconds} s")

    signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(seconds + _GRACE_S, exit=True, file=_STDERR)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write why a file has no tests."""
    if not report.passed:
        _add({"test": report.nodeid, "outcome": report.outcome, **_reason(report)})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write one line for each test: its call, or the set-up that failed or skipped it."""
    if report.when != "call" and report.passed:
        return
    seconds = round(report.duration, 2)
    _add({"test": report.nodeid, "outcome": report.outcome, "seconds": seconds, **_reason(report)})


def _reason(report: pytest.CollectReport | pytest.TestReport) -> dict[str, str]:
    if report.skipped and isinstance(report.longrepr, tuple):
        return {"reason": report.longrepr[2].removeprefix("Skipped: ")}
    if report.failed:
        lines = report.longreprtext.splitlines()
        raised = [one for one in lines if one.startswith("E ")]
        return {"reason": "\n".join([*raised[:_FIRST_LINES], lines[-1]])}
    return {}
