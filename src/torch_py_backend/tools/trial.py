"""One candidate tried in a process of its own: its outputs compared, its speed measured.

The reference is the same model as it was loaded, without any optimisation. For every batch size,
an output's error is the largest |value - reference| / (|reference| + typical), where typical is the
median of |reference| without zeros: a measure that neither a value close to zero nor a mask of
-1e9 in the output distorts. Integers, booleans and strings either are equal or not; their error is
the share that differs.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from torch_py_backend.artifacts import discovery
from torch_py_backend.batching import gather_scatter, runtime
from torch_py_backend.batching.gather_scatter import Item, Value
from torch_py_backend.config import model_config, threads
from torch_py_backend.config.model_config import ModelConfig, Origin, TensorSpec
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import (
    ArtifactError,
    BackendError,
    ConfigError,
    LoadError,
    OutputError,
    WarmupError,
    brief,
)
from torch_py_backend.loading import example_inputs, sample_inputs
from torch_py_backend.startup import builder, warmup

# A call that takes longer than the time it was given is still made as often as this.
_FEWEST_CALLS = 3
_POLL_S = 0.001
_INPUTS = "inputs.safetensors"


# --- the reference -----------------------------------------------------------------------------


def prepare(arguments: Mapping[str, str], folder: str, inputs: str | None) -> dict[str, Any]:
    """Write inputs and the outputs that candidates are compared with; tell what the model is.

    Args:
        arguments: what Triton passes to `initialize`, with the settings of the reference.
        folder: where they are written.
        inputs: a file of safetensors with inputs by name; None: examples, else made-up values.

    Raises:
        LoadError: the model cannot be run, or the inputs do not fit it.
    """
    settings = model_config.parse(arguments)
    made = builder.build(settings, threads.budget(settings))
    settings = made.config  # with the controls of a sequence that the model takes
    _warm_up(made)
    item, source = find_inputs(settings, inputs)
    given, expected = Path(folder) / _INPUTS, Path(folder)
    _write(given, item)
    for rows in sizes(settings):
        _write(expected / _reference(rows), _run(made, tile(settings, item, rows)))
    return {"kind": made.kind.name, "inputs": source, "sizes": sizes(settings)}


def sizes(settings: ModelConfig) -> list[int]:
    """The batch sizes to measure: powers of two and the largest; 1 alone without batching."""
    largest = max(1, settings.max_batch_size)
    powers = [1 << power for power in range(largest.bit_length())]
    return sorted({*powers, largest})


def _reference(rows: int) -> str:
    return f"reference_{rows}.safetensors"


def find_inputs(settings: ModelConfig, inputs: str | None) -> tuple[Item, str]:
    """Inputs, and in a word where they come from."""
    if inputs is not None:
        return _of_file(settings, Path(inputs)), Path(inputs).name
    torch.manual_seed(0)
    found = example_inputs.find(settings, discovery.find(settings))
    if found is not None:
        _refuse_misfit(settings, found, example_inputs.NAME)
        return found, example_inputs.NAME
    rows = settings.max_batch_size or None
    return sample_inputs.item(settings, rows), "made-up values"


def _of_file(settings: ModelConfig, path: Path) -> Item:
    try:
        item: Item = dict(safetensors.torch.load_file(path))
    except (safetensors.SafetensorError, OSError) as error:
        raise ArtifactError(
            settings.name,
            f"the inputs in {path.name} cannot be read: {brief(error)}",
            expected="a file that safetensors.torch.save_file wrote",
        ) from error
    _refuse_misfit(settings, item, path.name)
    return item


def _refuse_misfit(settings: ModelConfig, item: Item, source: str) -> None:
    """What Triton refuses before a request comes here: other names, types and sizes."""
    specs = {spec.name: spec for spec in settings.inputs}
    needed = {spec.name for spec in _sent(settings) if not spec.optional}
    if not needed <= item.keys() <= specs.keys():
        raise ConfigError(
            settings.name,
            f"{source} has {', '.join(sorted(item)) or 'no inputs'}",
            expected=f"the inputs {', '.join(sorted(specs))}",
        )
    for name, value in item.items():
        if not sample_inputs.fits(settings, specs[name], value):
            kind = str(value.dtype).removeprefix("torch.")
            rows = "one row at least of " if settings.max_batch_size else ""
            raise ConfigError(
                settings.name,
                f"the input '{name}' in {source} is {kind} {list(value.shape)}",
                expected=f"{rows}{specs[name]}",
            )


def tile(settings: ModelConfig, item: Item, rows: int) -> Item:
    """As many rows as asked for, the item's own over and over."""
    absent = {spec.name for spec in _sent(settings)} - item.keys()
    count = rows if settings.max_batch_size else None
    return sample_inputs.item(settings, count, without=absent, example=item)


def _sent(settings: ModelConfig) -> Iterator[TensorSpec]:
    """What requests bring: not the states and controls of a sequence."""
    return (spec for spec in settings.inputs if spec.origin is Origin.CLIENT)


def _run(made: Engine, item: Item) -> dict[str, Value]:
    results = []
    for outcome in made.run(sample_inputs.requests(made.config, item)):
        if isinstance(outcome, LoadError):
            raise outcome
        if isinstance(outcome, BackendError):
            tried = ", ".join(f"{name} {list(value.shape)}" for name, value in item.items())
            raise WarmupError(made.config.name, f"the call with {tried} failed: {outcome}")
        results.append(outcome)
    names = tuple(results[0])
    joined = gather_scatter.join([[one[name] for name in names] for one in results])
    return dict(zip(names, joined, strict=True))


# --- a candidate -------------------------------------------------------------------------------


class _Complaints(logging.Handler):
    """Warnings that a parameter has no effect, or is unknown."""

    def __init__(self, watched: Collection[str]) -> None:
        super().__init__(logging.WARNING)
        self.watched = watched
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        sentence = record.getMessage()
        if any(key in sentence.split() for key in self.watched):
            self.sentences.append(sentence)

    def refuse(self) -> None:
        """A candidate whose settings do nothing is not what its row would say."""
        for sentence in self.sentences[:1]:
            raise ConfigError.told(sentence)


def measure(
    arguments: Mapping[str, str],
    folder: str,
    seconds: float,
    watched: Sequence[str],
    place: tuple[int, int, str],
) -> dict[str, Any]:
    """Load a candidate, compare its outputs with the reference, and time it.

    Args:
        arguments: what Triton passes to `initialize`, with the candidate's settings.
        folder: where `prepare` wrote.
        seconds: how long each batch size is measured.
        watched: parameters that must have an effect, for the candidate to be what it says.
        place: this instance's number, how many there are, and a name that their meetings have in
            common: they measure each batch size at the same time.

    Raises:
        LoadError: it cannot be loaded or run.
        OutputError: its outputs are of another form than the reference's.
    """
    started = time.perf_counter()
    complaints = _Complaints(watched)
    logging.getLogger("torch_py_backend").addHandler(complaints)
    settings = model_config.parse(arguments)
    made = builder.build(settings, threads.budget(settings))
    settings = made.config
    complaints.refuse()  # before the warm-up, which may compile for minutes
    with runtime.mode(settings.options):
        _warm_up(made)
        item = _read(Path(folder) / _INPUTS)
        batches = {rows: tile(settings, item, rows) for rows in sizes(settings)}
        errors = [
            _error(made, batch, Path(folder) / _reference(rows)) for rows, batch in batches.items()
        ]
        load_s = time.perf_counter() - started
        times = {}
        for rows, batch in batches.items():
            _meet(Path(folder), rows, place)
            times[rows] = list(_timed(partial(_run, made, batch), seconds))
    return {
        "latency_ms": 1e3 * median(times[1]),
        "p99_ms": 1e3 * float(np.quantile(times[1], 0.99)),
        "throughput": {rows: rows * len(spent) / sum(spent) for rows, spent in times.items()},
        "memory_mb": psutil.Process().memory_full_info().pss / (1 << 20),
        "device_memory_mb": _device_memory_mb(),
        "error": max(errors),
        "load_s": load_s,
    }


def _warm_up(made: Engine) -> None:
    if made.config.options.warmup is not False:  # else the comparison's calls have to do
        warmup.run(made)


def _timed(call: Callable[[], Any], seconds: float) -> Iterator[float]:
    until = time.perf_counter() + seconds
    calls = 0
    while calls < _FEWEST_CALLS or time.perf_counter() < until:
        before = time.perf_counter()
        call()
        yield time.perf_counter() - before
        calls += 1


def _meet(folder: Path, rows: int, place: tuple[int, int, str]) -> None:
    """Wait until all instances are here; the parent ends us if one never comes."""
    number, count, name = place
    (folder / f"{name}-{rows}-{number}").touch()
    while any(not (folder / f"{name}-{rows}-{one}").exists() for one in range(count)):
        time.sleep(_POLL_S)


def _device_memory_mb() -> float:
    if not torch.cuda.is_available():
        return 0.0
    return torch.cuda.memory_reserved() / (1 << 20)


# --- comparison --------------------------------------------------------------------------------


def _error(made: Engine, batch: Item, reference: Path) -> float:
    """The largest error of a batch's outputs."""
    expected = _read(reference)
    # The first call of a shape may differ from the next: TorchScript optimises at the third.
    for _ in range(_FEWEST_CALLS):
        found = _run(made, batch)
    return max(
        _difference(made.config.name, name, found[name], value) for name, value in expected.items()
    )


def _difference(model: str, name: str, found: Value, expected: Value) -> float:
    if found.shape != expected.shape:
        raise OutputError(
            model,
            f"output '{name}' is {list(found.shape)}",
            expected=f"{list(expected.shape)}, as in eager",
        )
    if 0 in expected.shape:
        return 0.0
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return float(np.mean(np.array(_texts(found)) != np.array(_texts(expected))))
    if not expected.is_floating_point():
        return (found != expected).double().mean().item()
    return _relative(model, name, found.double(), expected.double())


def _relative(model: str, name: str, found: Tensor, expected: Tensor) -> float:
    finite = expected.isfinite()
    same = (found == expected) | (found.isnan() & expected.isnan())
    alike = torch.where(finite, found.isfinite(), same)
    if not alike.all():
        raise OutputError(
            model,
            f"output '{name}' has infinities or NaN in other places",
            expected="them where eager has them",
        )
    found, expected = found[finite], expected[finite]
    if not expected.numel():
        return 0.0
    size = expected.abs()
    typical = size[size > 0].median() if size.any() else torch.tensor(1.0)
    return ((found - expected).abs() / (size + typical)).max().item()


# --- values on disk ----------------------------------------------------------------------------


def _write(path: Path, values: Mapping[str, Value]) -> None:
    """Tensors as safetensors, strings as JSON in its metadata."""
    tensors = {
        name: value.contiguous().clone()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    strings = {
        name: json.dumps([value.shape, _texts(value)])
        for name, value in values.items()
        if not isinstance(value, Tensor)
    }
    safetensors.torch.save_file(tensors, path, strings)


def _texts(strings: Any) -> list[str]:
    """Strings, or bytes of any kind, as characters that JSON can hold: one for each byte."""
    encoded = (one if isinstance(one, bytes) else one.encode() for one in strings.flat)
    return [one.decode("latin-1") for one in encoded]


def _read(path: Path) -> dict[str, Value]:
    with safetensors.safe_open(path, "pt") as opened:
        values: dict[str, Value] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  no dict
        for name, told in (opened.metadata() or {}).items():
            shape, texts = json.loads(told)
            flat = np.array([text.encode("latin-1") for text in texts], dtype=np.object_)
            values[name] = flat.reshape(shape)
    return values
