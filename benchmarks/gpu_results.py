"""A pytest plugin: append the outcome of each test to the file in GPU_RESULTS, as it is known.

Tests that the file has as passed are not run again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

_FIRST_LINES = 5


def _path() -> Path:
    return Path(os.environ["GPU_RESULTS"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that have passed."""
    lines = map(json.loads, _path().read_text().splitlines()) if _path().exists() else ()
    passed = {line["test"] for line in lines if line.get("outcome") == "passed"}
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
        line["reason"] = report.longrepr[2]
    elif report.failed:
        # The end of a report has the exception.
        line["reason"] = "\n".join(report.longreprtext.splitlines()[-_FIRST_LINES:])
    with _path().open("a") as file:
        file.write(json.dumps(line) + "\n")
