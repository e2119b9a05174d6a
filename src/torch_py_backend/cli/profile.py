"""`torch-py-backend profile`: runs batches of a model under torch.profiler, and writes a trace."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from torch_py_backend.artifacts import repository
from torch_py_backend.autocomplete import completion
from torch_py_backend.config import pbtxt
from torch_py_backend.errors import ProfileError
from torch_py_backend.processes import child_process

_OUT = Console(highlight=False, emoji=False)
_SUFFIXES = (".json", ".json.gz")
# For the tables, where a log or a pipe sets no width.
_WIDTH = 100


def profile(
    model: Annotated[Path, typer.Argument(help="The model's folder.")],
    batches: Annotated[int, typer.Option(min=1, help="How many batches are recorded.")] = 10,
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
            help="Where the trace goes: a .json or .json.gz; by default MODEL.trace.json.gz, here."
        ),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also record what is allocated and freed.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that it may take.")] = 600.0,
) -> None:
    """Load a model without a server, and write a trace of some batches, with each stage."""
    if not model.is_dir():
        raise ProfileError(f"{model} is not a folder; expected a model's folder.")
    if inputs is not None and not inputs.is_file():
        raise ProfileError(f"{inputs} is not a file; expected inputs in safetensors.")
    folder = model.resolve()
    path = (output or Path(f"{folder.name}.trace.json.gz")).absolute()
    if not path.name.endswith(_SUFFIXES) or path.is_dir():
        raise ProfileError(
            f"--output is {path}; expected a file whose name ends in {' or '.join(_SUFFIXES)}."
        )
    with _beside(path) as scratch:
        found: dict[str, Any] = child_process.run(
            folder.name,
            "torch_py_backend.tools.profiling:run",
            {
                "arguments": _arguments(folder, timeout),
                "batches": batches,
                "requests": batch_size,
                "inputs": None if inputs is None else str(inputs.absolute()),
                "output": str(scratch),
                "memory": memory,
            },
            timeout,
        )
        scratch.replace(path)
    _print(found, batches, memory=memory)
    _OUT.print(f"wrote {path}", markup=False, soft_wrap=True)
    _OUT.print("to see it: open https://ui.perfetto.dev, and drop the file there", soft_wrap=True)


def _arguments(folder: Path, timeout: float) -> dict[str, str]:
    """What Triton would pass, the config completed as a server would."""
    document = pbtxt.read(folder)
    version = repository.latest(folder)
    if completion.is_incomplete(document):
        completion.complete(pbtxt.arguments(folder, version, document), document, timeout)
    else:
        completion.set_decoupled(document, folder / version)
    return pbtxt.arguments(folder, version, document)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Where a file is made before it is there as a whole; gone afterwards, whoever dies."""
    try:
        folder = tempfile.TemporaryDirectory(dir=path.parent, prefix=".profile-")
    except OSError as error:
        raise ProfileError(
            f"cannot write into {path.parent}: {error.strerror or error}; --output names another"
            " place for the trace."
        ) from None
    with folder as name:
        yield Path(name) / path.name


def _print(found: Mapping[str, Any], batches: int, *, memory: bool) -> None:
    if not _OUT.is_terminal:
        _OUT.width = max(_OUT.width, _WIDTH)
    stages = found["stages"]
    whole = sum(one["ms"] for one in stages if one["depth"] == 0)
    _OUT.print(_stages(stages, whole, batches))
    _OUT.print(_operators(found, whole, memory=memory))
    each = f"{found['requests']} request{'s' * (found['requests'] != 1)}"
    _OUT.print(
        f"{batches} batches of {each}, each {whole / batches:.3g} ms, on {found['device']};"
        f" inputs: {found['inputs']}. The profiler itself takes time, the more the shorter an"
        " operator is.",
        markup=False,
        soft_wrap=True,
    )


def _stages(stages: list[dict[str, Any]], whole: float, batches: int) -> Table:
    table = Table(box=None, title="stages", title_justify="left")
    table.add_column("stage")
    for name in ("calls", "ms a batch", "share"):
        table.add_column(name, justify="right")
    for one in stages:
        table.add_row(
            "  " * one["depth"] + one["stage"],
            str(one["calls"]),
            f"{one['ms'] / batches:.3g}",
            f"{one['ms'] / whole:.0%}",
        )
    return table


def _operators(found: Mapping[str, Any], whole: float, *, memory: bool) -> Table:
    rows = found["operators"]
    on_device = any(one["device_ms"] for one in rows)
    table = Table(box=None, title="operators, by their own time", title_justify="left")
    table.add_column("operator", max_width=60, no_wrap=True)
    columns = ["calls", "ms", "share of the time"]
    columns += ["device ms"] * on_device + ["MB allocated"] * memory
    for name in columns:
        table.add_column(name, justify="right")
    for one in rows:
        values = [
            str(one["calls"]),
            f"{one['self_ms']:.3g}",
            f"{one['self_ms'] / whole:.0%}",
        ]
        values += [f"{one['device_ms']:.3g}"] * on_device
        values += [f"{one['memory_mb']:.3g}"] * memory
        table.add_row(one["operator"], *values)
    return table
