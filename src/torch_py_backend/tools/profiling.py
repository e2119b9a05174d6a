"""Batches of a model without a server, profiled: its stages, its operators, and a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import profile

from torch_py_backend.batching import runtime
from torch_py_backend.batching.gather_scatter import Item, Outcome
from torch_py_backend.config import model_config, threads, tuned_settings
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine.engine import Engine
from torch_py_backend.errors import BackendError, ConfigError, LoadError, OutputError, WarmupError
from torch_py_backend.observability import trace_recording
from torch_py_backend.startup import builder, warmup
from torch_py_backend.streaming import streams
from torch_py_backend.tools import trial

_MOST_OPERATORS = 15
_MS = 1e-3


def run(
    arguments: Mapping[str, str],
    batches: int,
    requests: int | None,
    inputs: str | None,
    output: str,
    *,
    memory: bool,
) -> dict[str, Any]:
    """Load a model as a server would, and profile batches; run in a child process.

    Args:
        arguments: what Triton passes to `initialize`.
        batches: how many batches are recorded.
        requests: how many requests of a row each are in a batch; None: as many as Triton batches.
        inputs: a file of safetensors with inputs by name; None: examples, else made-up values.
        output: where the trace is written.
        memory: whether it tells of allocations.

    Returns:
        What was found, as JSON.

    Raises:
        LoadError: the model cannot be run, or the inputs do not fit it.
    """
    settings = tuned_settings.apply(model_config.parse(arguments))
    made = builder.build(settings, threads.budget(settings))
    settings = made.config  # with the controls of a sequence that the model takes
    item, source = trial.find_inputs(settings, inputs)
    items = _requests(settings, item, requests)
    call = streams.trial(made) if settings.decoupled else made.run
    with runtime.mode(settings.options):
        if settings.options.warmup is not False:
            warmup.run(made)
        with profile():  # the first time of a shape, and of the profiler, is not what is asked for
            _called(made, call, items)
        begun = trace_recording.Recording(made, memory=memory)
        for _ in range(batches):
            with trace_recording.batch():
                _called(made, call, items)
        recorded = begun.stop()
    made.leave()
    try:
        trace_recording.write(recorded, Path(output))
    except OSError as error:
        raise LoadError(
            settings.name, f"the trace cannot be written: {error.strerror or error}"
        ) from None
    return {
        "inputs": source,
        "requests": len(items),
        "device": str(made.device),
        "stages": _stages(recorded),
        "operators": _operators(recorded),
    }


def _requests(settings: ModelConfig, item: Item, count: int | None) -> list[Item]:
    """Requests of a row each; without a batch dimension a request is a batch."""
    most = settings.max_batch_size
    if count is None:
        count = 1 if settings.decoupled else max(1, most)
    if count > max(1, most):
        raise ConfigError(
            settings.name,
            f"a batch of {count} is asked for, and max_batch_size is {most}",
            expected=f"--batch-size of at most {max(1, most)}",
        )
    whole = trial.tile(settings, item, count)
    if not most:
        return [whole]
    return [{name: value[at : at + 1] for name, value in whole.items()} for at in range(count)]


def _called(
    made: Engine, call: Callable[[Sequence[Item]], Sequence[Outcome]], items: Sequence[Item]
) -> None:
    error = next((one for one in call(items) if isinstance(one, BackendError)), None)
    if isinstance(error, LoadError | OutputError):
        raise error
    if error is not None:
        raise WarmupError(made.config.name, f"a batch of {len(items)} failed: {error}")


def _stages(recorded: profile) -> list[dict[str, Any]]:
    """The ranges, in the order in which they began, each within those above it.

    Returns:
        For each its name, depth, calls and milliseconds, those within it included.
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    ranges = [one for one in recorded.events() or () if _is_range(one)]
    for one in sorted(ranges, key=lambda one: one.time_range.start):
        place = _place(one)
        row = found.setdefault(
            place, {"stage": place[-1], "depth": len(place) - 1, "calls": 0, "ms": 0.0}
        )
        row["calls"] += 1
        row["ms"] += one.time_range.elapsed_us() * _MS
    # Beneath what they are within, wherever that stands.
    order = list(found)
    return [found[place] for place in sorted(order, key=lambda place: _rank(order, place))]


def _rank(order: Sequence[tuple[str, ...]], place: tuple[str, ...]) -> list[int]:
    return [order.index(place[: end + 1]) for end in range(len(place))]


def _is_range(event: Any) -> bool:
    # On a GPU the range of a stage is a second event, of the device's.
    return bool(event.name.startswith(trace_recording.PREFIX) and event.device_type.name == "CPU")


def _place(event: Any) -> tuple[str, ...]:
    """The names of the ranges that a range is within, and its own."""
    names: list[str] = []
    while event is not None:
        if event.name.startswith(trace_recording.PREFIX):
            names.append(event.name.removeprefix(trace_recording.PREFIX))
        event = event.cpu_parent
    return tuple(reversed(names))


def _operators(recorded: profile) -> list[dict[str, Any]]:
    """The operators that took longest, by the device's own time where there is one."""
    rows = [
        {
            "operator": one.key,
            "calls": one.count,
            "self_ms": one.self_cpu_time_total * _MS,
            "device_ms": one.self_device_time_total * _MS,
            "memory_mb": one.self_cpu_memory_usage / (1 << 20),
        }
        for one in recorded.key_averages()
        if not one.key.startswith(trace_recording.PREFIX)
    ]
    key = "device_ms" if any(row["device_ms"] for row in rows) else "self_ms"
    return sorted(rows, key=lambda row: -row[key])[:_MOST_OPERATORS]
