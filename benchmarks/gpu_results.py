"""A pytest plugin: append the outcome of each test to the file in GPU_RESULTS, as it is known.

Tests that the file has as passed are not run again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import gpu

_FIRST_LINES = 5


def _path() -> Path:
    return Path(os.environ["GPU_RESULTS"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that have passed."""
    passed = {line["test"] for line in gpu.read(_path()) if line.get("outcome") == "passed"}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write one line for each test: its call, or the set-up that failed or skipped it."""
    if report.when != "call" and report.passed:
        return
    line: dict[str, object] = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "seconds": round(report.duration, 2),
    }
    if report.skipped and isinstance(report.longrepr, tuple):
        line["reason"] = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        lines = report.longreprtext.splitlines()
        raised = [one for one in lines if one.startswith("E ")]
        line["reason"] = "\n".join([*raised[:_FIRST_LINES], lines[-1]])
    with _path().open("a") as file:
        file.write(json.dumps(line) + "\n")
