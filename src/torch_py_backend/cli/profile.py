"""`torch-py-backend profile`: runs batches of a model under torch.profiler, and writes a trace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from torch_py_backend.errors import ToolError
from torch_py_backend.tools import model_folder, report

_OUT = Console(highlight=False, emoji=False)
_SUFFIXES = (".json", ".json.gz")
# For the tables, where a log or a pipe sets no width.
_WIDTH = 100


def profile(
    model: Annotated[Path, typer.Argument(help="The model's folder.")],
    batches: Annotated[int, typer.Option(min=1, help="Number of batches to record.")] = 10,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests of a row each in a batch; by default the config's max_batch_size."
        ),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Inputs by name, in safetensors; by default the model's example_inputs, else"
            " made-up values."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Path of the trace, a .json or .json.gz; by default MODEL.trace.json.gz."
        ),
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Also record allocations.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Time limit in seconds.")] = 600.0,
) -> None:
    """Load a model without a server, and write a trace of some batches, with each stage."""
    if not model.is_dir():
        raise ToolError(f"{model} is not a folder; expected a model's folder.")
    if inputs is not None and not inputs.is_file():
        raise ToolError(f"{inputs} is not a file; expected inputs in safetensors.")
    folder = model.resolve()
    path = (output or Path(f"{folder.name}.trace.json.gz")).absolute()
    if not path.name.endswith(_SUFFIXES):
        raise ToolError(
            f"--output is {path}; expected a file whose name ends in {' or '.join(_SUFFIXES)}."
        )
    report.check_writable(path)
    version, document = model_folder.completed(folder, timeout)
    summary = model_folder.run(
        "tools.profiling:run",
        folder,
        version,
        document,
        timeout,
        batches=batches,
        requests=batch_size,
        inputs=None if inputs is None else str(inputs.absolute()),
        output=str(path),
        memory=memory,
    )
    _print_summary(summary, batches, memory=memory)
    _OUT.print(f"wrote {path}", markup=False, soft_wrap=True)
    _OUT.print("to view it, open it on https://ui.perfetto.dev", soft_wrap=True)


def _print_summary(summary: Mapping[str, Any], batches: int, *, memory: bool) -> None:
    if not _OUT.is_terminal:
        _OUT.width = max(_OUT.width, _WIDTH)
    total_ms = sum(stage["ms"] for stage in summary["stages"] if stage["depth"] == 0)
    stages = report.table(("stage", "calls", "ms a batch", "share"), title="stages")
    for stage in summary["stages"]:
        stages.add_row(
            "  " * stage["depth"] + stage["stage"],
            str(stage["calls"]),
            f"{stage['ms'] / batches:.3g}",
            f"{stage['ms'] / total_ms:.0%}",
        )
    _OUT.print(stages)
    on_device = any(operator["device_ms"] for operator in summary["operators"])
    columns = ["calls", "ms", "share of the time"]
    columns += ["device ms"] * on_device + ["MB allocated"] * memory
    operators = report.table(("operator", *columns), title="operators, by their own time")
    for operator in summary["operators"]:
        operators.add_row(
            operator["operator"],
            str(operator["calls"]),
            f"{operator['self_ms']:.3g}",
            f"{operator['self_ms'] / total_ms:.0%}",
            *[f"{operator['device_ms']:.3g}"] * on_device,
            *[f"{operator['memory_mb']:.3g}"] * memory,
        )
    _OUT.print(operators)
    requests = f"{summary['requests']} request{'s' * (summary['requests'] != 1)}"
    _OUT.print(
        f"{batches} batches of {requests}, each {total_ms / batches:.3g} ms, on"
        f" {summary['device']}; inputs: {summary['inputs']}. The profiler adds overhead, most"
        " to short operators.",
        markup=False,
        soft_wrap=True,
    )
