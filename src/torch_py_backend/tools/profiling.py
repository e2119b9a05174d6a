"""Profile batches of a model without a server: time by stage, time by operator, and a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile

from torch_py_backend.batching import runtime
from torch_py_backend.batching.gather_scatter import Item, Outcome
from torch_py_backend.config import model_config, threads, tuned_settings
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.errors import BackendError, ConfigError, LoadError, OutputError, WarmupError
from torch_py_backend.observability import profiling
from torch_py_backend.observability.profiling import PREFIX
from torch_py_backend.startup import builder
from torch_py_backend.streaming import streams
from torch_py_backend.tools import trial

_MAX_OPERATORS = 15
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
    """Load a model as a server would and profile batches. Runs in a child process.

    Args:
        arguments: the arguments that Triton passes to `initialize`.
        batches: number of batches to record.
        requests: number of requests of one row in a batch; None: max_batch_size.
        inputs: a safetensors file of inputs by name; None: examples, or made-up values.
        output: path of the trace.
        memory: whether to record allocations.

    Returns:
        A summary that JSON can represent.

    Raises:
        LoadError: the model cannot be run, or the inputs do not fit it.
    """
    config = tuned_settings.apply(model_config.parse(arguments))
    engine = builder.build(config, threads.budget(config))
    config = engine.config  # with the controls of a sequence that the model takes
    item, source = trial.find_inputs(config, inputs)
    items = _requests(config, item, requests)
    call = streams.trial(engine) if config.decoupled else engine.run
    with runtime.mode(config.options):
        trial.warm_up(engine)
        with profile():  # the first call of a shape and the first profile are slower
            _call(config, call, items)
        recording = profiling.Recording(engine, memory=memory)
        for _ in range(batches):
            with profiling.batch():
                _call(config, call, items)
        profiler = recording.stop()
    engine.close()
    try:
        profiling.write(profiler, Path(output))
    except OSError as error:
        raise LoadError(
            config.name, f"the trace cannot be written: {error.strerror or error}"
        ) from None
    return {
        "inputs": source,
        "requests": len(items),
        "device": str(engine.device),
        "stages": _stages(profiler),
        "operators": _operators(profiler),
    }


def _requests(config: ModelConfig, item: Item, count: int | None) -> list[Item]:
    """Return requests of one row each; without a batch dimension, one request."""
    limit = max(1, config.max_batch_size)
    if count is None:
        count = 1 if config.decoupled else limit
    if count > limit:
        raise ConfigError(
            config.name,
            f"--batch-size is {count}, and max_batch_size is {config.max_batch_size}",
            expected=f"--batch-size of at most {limit}",
        )
    rows = trial.tile(config, item, count)
    if not config.max_batch_size:
        return [rows]
    return [{name: value[at : at + 1] for name, value in rows.items()} for at in range(count)]


def _call(
    config: ModelConfig,
    call: Callable[[Sequence[Item]], Sequence[Outcome]],
    items: Sequence[Item],
) -> None:
    error = next((outcome for outcome in call(items) if isinstance(outcome, BackendError)), None)
    if isinstance(error, LoadError | OutputError):
        raise error
    if error is not None:
        raise WarmupError(config.name, f"a batch of {len(items)} failed: {error}")


def _stages(profiler: profile) -> list[dict[str, Any]]:
    """Return the ranges in the order in which they began, each after the range around it.

    Returns:
        For each range its name, depth, calls and milliseconds, inner ranges included.
    """
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    events: Sequence[FunctionEvent] = profiler.events() or ()
    # On a GPU, each range has a second event, of the device.
    ranges = [
        event
        for event in events
        if event.name.startswith(PREFIX) and event.device_type.name == "CPU"
    ]
    for event in sorted(ranges, key=lambda event: event.time_range.start):
        path: tuple[str, ...] = ()
        outer: FunctionEvent | None = event
        while outer is not None:
            if outer.name.startswith(PREFIX):
                path = (outer.name.removeprefix(PREFIX), *path)
            outer = outer.cpu_parent
        row = rows.setdefault(
            path, {"stage": path[-1], "depth": len(path) - 1, "calls": 0, "ms": 0.0}
        )
        row["calls"] += 1
        row["ms"] += event.time_range.elapsed_us() * _MS
    order = {path: position for position, path in enumerate(rows)}
    ranks = {path: [order[path[: end + 1]] for end in range(len(path))] for path in order}
    return [rows[path] for path in sorted(order, key=ranks.__getitem__)]


def _operators(profiler: profile) -> list[dict[str, Any]]:
    """Return the slowest operators, by their time on the device if it reports any."""
    rows = [
        {
            "operator": average.key,
            "calls": average.count,
            "self_ms": average.self_cpu_time_total * _MS,
            "device_ms": average.self_device_time_total * _MS,
            "memory_mb": average.self_cpu_memory_usage / (1 << 20),
        }
        for average in profiler.key_averages()
        if not average.key.startswith(PREFIX)
    ]
    key = "device_ms" if any(row["device_ms"] for row in rows) else "self_ms"
    return sorted(rows, key=lambda row: -row[key])[:_MAX_OPERATORS]
