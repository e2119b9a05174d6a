"""Measure ways to run a model beside the way that config.pbtxt has.

Each candidate runs in a process of its own, together with the model as configured. The two are
timed in turn (A B B A), because the speed of a machine drifts within minutes. Imports no torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from torch_py_backend.config import model_config, pbtxt
from torch_py_backend.config.pbtxt import Document, JsonObject
from torch_py_backend.errors import LoadError
from torch_py_backend.processes import child_process

COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
TUNED = ("OPTIMIZE", COMPILE, "BATCH_BUCKETS")  # a candidate replaces them
_MAX_ERROR = 1e-4  # the largest difference from the outputs as configured, relative to their values
_MAX_ERROR_REDUCED = 0.03
_ROUNDS = 5
_LIMIT_S = 3600.0  # of a candidate, with its compilation
_SECONDS = 0.2  # of one measurement
# A candidate is better from this product of both gains on, and if neither gain is a loss.
LEAST_GAIN = 1.03**2
_LOSS = 0.98
TITLES = "candidate                     ms    gain  rows/s    gain READY s   error"
_FIGURES = "{ms:8.3g}{gains[0]:8.2f}{rows_per_s:8,.0f}{gains[1]:8.2f}{ready_s:8.1f}{error:8.1g}"
_FREEZING = '{"options": {"freezing": true}}'
_GRAPHS = {COMPILE: '{"mode": "reduce-overhead"}', "BATCH_BUCKETS": "auto"}
_MODULES = ("MODULE", "FACTORY", "EXPORTED")
_SOURCES = ("MODULE", "FACTORY")
_WEIGHTS = (*_SOURCES, "TORCHSCRIPT")
# Title, names of the artifact types that can be run so, and options.
_CANDIDATES: tuple[tuple[str, tuple[str, ...], dict[str, str]], ...] = (
    ("eager", _MODULES, {}),
    ("channels_last", _WEIGHTS, {"OPTIMIZE": "channels_last"}),
    ("freeze", ("TORCHSCRIPT",), {"OPTIMIZE": "freeze"}),
    ("aoti", _MODULES, {"OPTIMIZE": "aoti"}),
    ("aoti, channels_last", _SOURCES, {"OPTIMIZE": "aoti,channels_last"}),
    ("compile", _MODULES, {COMPILE: "{}"}),
    ("compile, freezing", _MODULES, {COMPILE: _FREEZING}),
    ("compile, channels_last", _MODULES, {COMPILE: "{}", "OPTIMIZE": "channels_last"}),
    ("compile, fixed sizes", _MODULES, {COMPILE: '{"dynamic": false}'}),
    ("compile, CUDA graphs", _MODULES, _GRAPHS),
    ("bf16", _WEIGHTS, {"OPTIMIZE": "bf16"}),
    ("aoti, bf16", _SOURCES, {"OPTIMIZE": "aoti,bf16"}),
    ("compile, freezing, bf16", _SOURCES, {COMPILE: _FREEZING, "OPTIMIZE": "bf16"}),
)


class Row(NamedTuple):
    """A candidate. `gain` is the product of its gains; 0: it is slower, or its outputs differ."""

    title: str
    parameters: Mapping[str, str]
    text: str
    gain: float = 0.0


def candidates(
    folder: Path,
    version: str,
    document: Document,
    *,
    reduced: bool,
) -> Iterator[Row]:
    """Yield the figures of the model as configured, and then of each candidate that suits it.

    The first show how far two measurements differ. 16-bit types are tried if `reduced`.
    """
    configured = pbtxt.arguments(folder, version, document)
    sent = {"arguments": configured, "configured": configured}
    task = f"{__name__}:measure"
    first = child_process.run(task, sent, _LIMIT_S, quiet=True)
    yield Row("as configured", {}, _FIGURES.format(**first))
    on_gpu = document["instance_group"][0]["kind"] == "KIND_GPU"
    others = {k: v for k, v in document["parameters"].items() if k not in TUNED}
    for title, kinds, parameters in _CANDIDATES:
        suits = first["kind"] in kinds and (on_gpu or parameters is not _GRAPHS)
        if not suits or ("bf16" in title and not reduced):
            continue
        candidate = {**document, "parameters": others | pbtxt.parameters(parameters)}
        sent["arguments"] = pbtxt.arguments(folder, version, candidate)
        try:
            figures = child_process.run(task, sent, _LIMIT_S, quiet=True)
        except LoadError as error:
            yield Row(title, parameters, str(error))
            continue
        gains = figures["gains"]
        exact = figures["error"] <= (_MAX_ERROR_REDUCED if reduced else _MAX_ERROR)
        gain = math.prod(gains) if exact and min(gains) >= _LOSS else 0.0
        yield Row(title, parameters, _FIGURES.format(**figures), gain)


def measure(arguments: Mapping[str, str], configured: Mapping[str, str]) -> JsonObject:
    """Measure a candidate, in a child process that has not compiled anything yet.

    `gains` are the ratios to the model as configured for one row and for full batches, medians of
    the rounds; `error` is the largest difference from its outputs, relative to their values.
    """
    import torch
    from torch.utils.benchmark import Timer

    from torch_py_backend.engine import warmup
    from torch_py_backend.model_folders.inspection import load_warm
    from torch_py_backend.pipeline.differences import difference

    settings = model_config.parse(arguments)
    full = max(1, settings.max_batch_size)
    began = time.perf_counter()
    candidate = load_warm(settings, (1, full))
    ready_s = time.perf_counter() - began
    engines = candidate, load_warm(model_config.parse(configured), (1, full))
    errors, seconds, gains = [], [], []
    for rows in (1, full):
        sample = warmup.sample(candidate, rows)
        calls = [partial(warmup.outputs, engine, sample) for engine in engines]
        for outputs, expected in zip(*(call() for call in calls), strict=True):
            errors += [difference(outputs[name], expected[name]) for name in expected]
        threads = torch.get_num_threads()
        timers = [Timer("call()", globals={"call": call}, num_threads=threads) for call in calls]
        times: list[list[float]] = [[], []]
        for turn in range(_ROUNDS):
            for number in (0, 1) if turn % 2 else (1, 0):
                timed = timers[number].blocked_autorange(min_run_time=_SECONDS)
                times[number].append(timed.median)
        seconds.append(median(times[0]))
        gains.append(median(b / a for a, b in zip(*times, strict=True)))
    return {
        "kind": candidate.loaded.kind.name,
        "ms": 1e3 * seconds[0],
        "rows_per_s": full / seconds[1],
        "gains": gains,
        "ready_s": ready_s,
        "error": max(errors),
    }
