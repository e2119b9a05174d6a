"""Measure execute() in real stubs of a real tritonserver: plain models, features, sequences.

    python -m benchmarks.execute [--models add,mlp,lstm] [--against CHECKOUT] [--calls]
        [--turns 7] [--bursts 30] [--output FILE]

Figures are CPU times of the thread that calls execute(), with 1, 8 and 32 requests of one row. One
client sends so many requests at once and waits for all answers, and so on; calls with another
number of requests are left out. The models take turns, A B C … C B A. A ratio is the median of the
ratios of all turns, with the least and the largest. All answers are compared with PyTorch's first.

`--against` serves each model twice, with this checkout's backend and with another one's. `--calls`
counts the calls of functions of the backend, and the modules that they are in, instead.

Nothing here depends on the modules of the package: see `stubs`, `gauges` and `served/gauge.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

from benchmarks import gauges, stubs
from benchmarks.gauges import BY_HAND, MOST, PLAIN, SEQUENCE, Case
from benchmarks.tables import markdown, spread, write_table

SIZES = (1, 8, MOST)
_BASES = ("add", "mlp", gauges.LSTM)
# The name of this checkout's backend, and of the other one's.
_THIS, _OTHER = "this", "other"
_TOLERANCE = 1e-5
_LONGEST_SECONDS = 60

Burst: TypeAlias = Callable[[Sequence[service_pb2.ModelInferRequest]], Awaitable[list[Any]]]
# What a model's calls of execute() with a number of requests took in a turn.
Figures: TypeAlias = dict[tuple[str, int], list[list[Any]]]


@dataclass(frozen=True)
class Subject:
    """A case that is served by one version of the backend."""

    case: Case
    backend: str

    @property
    def name(self) -> str:
        """Its name on the server."""
        return _name(self.case.feature, self.backend)

    def request(
        self, place: int, *, starts: bool = False, ends: bool = False
    ) -> service_pb2.ModelInferRequest:
        """Return a request; it may start or end a sequence."""
        parameters: dict[str, Any] = {}
        if self.case.feature == SEQUENCE:
            parameters = {"sequence_id": place + 1, "sequence_start": starts, "sequence_end": ends}
        return stubs.request(self.name, self.case.requests[place], parameters)


def _name(feature: str, backend: str) -> str:
    return f"{feature.replace(' ', '_')}_{backend}"


def measure(
    cases: Sequence[Case], checkouts: dict[str, Path], gauge: str, turns: int, bursts: int
) -> Figures:
    """Serve cases, and return what their calls took.

    Args:
        cases: the models.
        checkouts: the versions of the backend by name.
        gauge: what is measured: see `served/gauge.py`.
        turns: how often each model is called with each number of requests,
        bursts: and with how many calls each time.

    Raises:
        StartError: a model did not load.
        AssertionError: a response is wrong.
    """
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as name:
        folder = Path(name)
        subjects = []
        for case in cases:
            for backend, checkout in checkouts.items():
                subjects.append(Subject(case, backend))
                case.write(folder / "repository" / subjects[-1].name, backend, checkout)
                if case.feature == BY_HAND:
                    break
        variables = {"GAUGE": gauge, "GAUGE_FOLDER": name, "OMP_NUM_THREADS": "1"}
        with stubs.served(folder / "repository", checkouts, variables, gauge=True) as server:
            windows = asyncio.run(_load(server.grpc, subjects, turns, bursts))
        calls = {
            subject.name: json.loads((folder / f"{subject.name}.json").read_text())
            for subject in subjects
        }
    figures: Figures = {}
    for (model, size), periods in windows.items():
        figures[model, size] = turns_of_model = []
        for first, last in periods:
            found = [
                figure
                for ended, requests, figure in calls[model]
                if requests == size and first < ended < last
            ]
            # On a busy machine, batches fall apart.
            is_enough = gauge == "calls" or len(found) * 3 > bursts
            turns_of_model.append(found if is_enough else [])
    return figures


async def _load(
    address: str, subjects: Sequence[Subject], turns: int, bursts: int
) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """Compare the answers of all models, then put load on each in turn; return when that was."""
    windows = defaultdict(list)
    async with grpc.aio.insecure_channel(address) as channel:
        infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer

        async def burst(requests: Sequence[service_pb2.ModelInferRequest]) -> list[Any]:
            return await asyncio.gather(*(infer(one, timeout=_LONGEST_SECONDS) for one in requests))

        for subject in subjects:
            await _check(subject, burst)
        for turn, size in itertools.product(range(turns), SIZES):
            for subject in subjects if turn % 2 == 0 else subjects[::-1]:
                requests = [subject.request(place) for place in range(size)]
                start = time.monotonic_ns()
                for _ in range(bursts):
                    await burst(requests)
                windows[subject.name, size].append((start, time.monotonic_ns()))
        # Triton waits for sequences before it ends its instances.
        for subject in subjects:
            await burst([subject.request(place, ends=True) for place in range(MOST)])
    return windows


async def _check(subject: Subject, burst: Burst) -> None:
    """Compare the answers of a model, alone and with all others, with the right ones."""
    for step, answers in enumerate(subject.case.answers):
        requests = [subject.request(place, starts=step == 0) for place in range(MOST)]
        responses = await burst(requests)
        if len(subject.case.answers) == 1:
            responses += await burst(requests[:1])
        for response, expected in zip(responses, [*answers, answers[0]], strict=False):
            result = InferResult(response)
            for name, array in expected.items():
                compare(f"{subject.name}, {name}", result.as_numpy(name), array)


def compare(name: str, actual: Any, expected: Any) -> None:
    """Raise an AssertionError if two arrays differ."""
    if expected.dtype == np.object_:
        expected = np.array([text.encode() for text in expected.flat]).reshape(expected.shape)
        np.testing.assert_array_equal(actual.astype(bytes), expected, name)
    else:
        np.testing.assert_allclose(actual, expected, _TOLERANCE, _TOLERANCE, err_msg=name)


def times(base: str, checkouts: dict[str, Path], turns: int, bursts: int) -> list[list[str]]:
    """Return a row for each case of a model and number of requests."""
    cases = gauges.cases(base)
    figures = measure(cases, checkouts, "time", turns, bursts)
    rows = []
    for case, size in itertools.product(cases, SIZES):
        ours = figures[_name(case.feature, _THIS), size]
        medians = [statistics.median(turn) / 1e3 for turn in ours if turn]
        row = [base, case.feature, str(size), spread(medians).text(0) if medians else "?"]
        others = [(PLAIN, _THIS), (BY_HAND, _THIS), (case.feature, _OTHER)]
        for other in others if _OTHER in checkouts else others[:2]:
            is_itself = other == (case.feature, _THIS)
            row.append("" if is_itself else _ratio(ours, figures.get((_name(*other), size), [])))
        rows.append(row)
    return rows


def _ratio(ours: Sequence[list[int]], other: Sequence[list[int]]) -> str:
    """Return the ratio of two models' medians, of all turns in which both were measured."""
    ratios = [
        statistics.median(first) / statistics.median(second)
        for first, second in zip(ours, other, strict=False)
        if first and second
    ]
    return spread(ratios).text(2) if ratios else ""


def calls(base: str, checkouts: dict[str, Path]) -> list[list[str]]:
    """Return a row for each case of a model, with the calls and modules of each version."""
    cases = [case for case in gauges.cases(base) if case.feature != BY_HAND]
    figures = measure(cases, checkouts, "calls", 1, 9)
    rows = []
    for case in cases:
        row = [base, case.feature]
        for backend, size in itertools.product(checkouts, SIZES):
            (called,) = figures[_name(case.feature, backend), size]
            files = sorted(called, key=len)[len(called) // 2] if called else []
            row.append(f"{len(files)} in {len(set(files))}")
        rows.append(row)
    return rows


def main(words: list[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(_BASES))
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--calls", action="store_true", help="count calls instead")
    parser.add_argument("--turns", default=7, type=int)
    parser.add_argument("--bursts", default=30, type=int)
    parser.add_argument("--output", type=Path, help="a document with the marks of this table")
    settings = parser.parse_args(words)
    checkouts = {_THIS: stubs.ROOT}
    if settings.against is not None:
        checkouts[_OTHER] = settings.against.absolute()
    bases = settings.models.split(",")
    if settings.calls:
        columns = ["model", "with"]
        columns += [f"{size}, {name}" for name, size in itertools.product(checkouts, SIZES)]
        rows = [row for base in bases for row in calls(base, checkouts)]
    else:
        columns = ["model", "with", "requests", "execute(), µs", "÷ plain", "÷ by hand"]
        columns += [f"÷ {_OTHER}"] * (_OTHER in checkouts)
        rows = [
            row for base in bases for row in times(base, checkouts, settings.turns, settings.bursts)
        ]
    table = markdown(columns, rows)
    print(table)
    if settings.output is not None:
        write_table(settings.output, "execute", table)


if __name__ == "__main__":
    main()
