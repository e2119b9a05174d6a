"""A trace that the profiler wrote, read as Perfetto and Chrome read it."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_py_backend.observability.profiling import PREFIX

# Of Chrome's format: what a complete event must have.
_KEYS = {"ph", "name", "pid", "tid", "ts", "dur"}


@dataclass(frozen=True)
class Range:
    """A range of a stage.

    Attributes:
        within: the ranges around it, from the outermost on.
        operators: those that ran in it.
    """

    name: str
    within: tuple[str, ...]
    operators: frozenset[str]


def read(path: Path) -> list[Range]:
    """The ranges of a trace in the order in which they began; it is what it has to be."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        trace = json.load(file)
    events = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert all(one.keys() >= _KEYS and one["dur"] >= 0 for one in events)
    events.sort(key=lambda one: (one["ts"], -one["dur"]))
    ranges = [one for one in events if one.get("cat") == "user_annotation"]
    operators = [one for one in events if one.get("cat") == "cpu_op"]
    return [
        Range(
            one["name"].removeprefix(PREFIX),
            tuple(
                other["name"].removeprefix(PREFIX)
                for other in ranges
                if other is not one and _holds(other, one)
            ),
            frozenset(other["name"] for other in operators if _holds(one, other)),
        )
        for one in ranges
        if one["name"].startswith(PREFIX)
    ]


def _holds(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    """Whether an event lies in another one; of the same thread they never overlap in part."""
    if (outer["pid"], outer["tid"]) != (inner["pid"], inner["tid"]):
        return False
    begins, ends = outer["ts"], outer["ts"] + outer["dur"]
    first, last = inner["ts"], inner["ts"] + inner["dur"]
    if ends <= first or last <= begins:
        return False
    if begins <= first and last <= ends:
        return True
    assert first <= begins, (outer, inner)
    assert ends <= last, (outer, inner)
    return False
