"""`torch-py-backend tune`: measure settings for a model and write the best into its config."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from torch_py_backend import files
from torch_py_backend.cli import interruption
from torch_py_backend.cli.interruption import DeadlineReached, Stopped
from torch_py_backend.config import pbtxt, tuned_settings
from torch_py_backend.errors import ToolError
from torch_py_backend.tools import config_editor, model_folder, report
from torch_py_backend.tools.candidates import TUNED, Allowed, Candidate
from torch_py_backend.tools.ranking import Goal, Limits, Row
from torch_py_backend.tools.tuning import Plan, Tuning

# Rounding of float32 with another order of sums; 16-bit types keep two or three digits.
_MAX_ERROR = 1e-4
_MAX_ERROR_REDUCED = 3e-2
# The deadline of --quick; loading the command and a config's completion take some seconds more.
_QUICK_S = 50.0
_INTERRUPTED = 130  # the exit code of a command that Ctrl-C stopped
_OUT = Console(highlight=False, emoji=False, soft_wrap=True)
_ERR = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
# Of the table, if the output is not a terminal.
_WIDTH = 100


def tune(
    model: Annotated[Path, typer.Argument(help="The model's folder.")],
    goal: Annotated[
        Goal,
        typer.Option(
            "--for",
            help="What to choose by: the latency of one request in flight, rows per second with"
            " full batches, or both: the best mean of the two without a loss in either.",
        ),
    ] = Goal.BOTH,
    max_error: Annotated[
        float | None,
        typer.Option(
            help="The largest accepted difference from eager, relative to the output's"
            f" values. By default {_MAX_ERROR:g}; with --reduced-precision {_MAX_ERROR_REDUCED:g}."
        ),
    ] = None,
    max_p99: Annotated[
        float | None,
        typer.Option(
            help="The longest accepted 99th percentile of a full batch, in milliseconds. A full"
            " batch has as many rows as the untuned model answers within that."
        ),
    ] = None,
    reduced_precision: Annotated[
        bool, typer.Option("--reduced-precision", help="Also try 16-bit types, and TF32 on a GPU.")
    ] = False,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Inputs by name as safetensors; by default the model's example_inputs, else"
            " made-up values."
        ),
    ] = None,
    threads: Annotated[
        str,
        typer.Option(
            help="Numbers of threads to try: 1,2,4. By default those that fit; on a GPU an equal"
            " share of the cores."
        ),
    ] = "",
    instances: Annotated[
        str, typer.Option(help="Numbers of instances to try: 1,2. By default those that fit.")
    ] = "",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Try fewer counts, measure less, and choose within about a minute."
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="Time limit of a candidate's load, in seconds.")
    ] = 300.0,
    deadline: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds for all measurements; then the best so far is chosen."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder of tuned.json; by default the model's folder, and none with --dry-run."
        ),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write this run's results to this file.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the change of config.pbtxt; write nothing.")
    ] = False,
) -> None:
    """Measure runtimes, threads and instances for a model; write the best into its config."""
    if not model.is_dir():
        raise ToolError(f"{model} is not a folder; expected a model's folder.")
    if max_error is None:
        max_error = _MAX_ERROR_REDUCED if reduced_precision else _MAX_ERROR
    if not (math.isfinite(max_error) and max_error >= 0):
        raise ToolError(f"--max-error is {max_error:g}; expected a number of at least 0, as 1e-4.")
    if max_p99 is not None and not (math.isfinite(max_p99) and max_p99 > 0):
        raise ToolError(f"--max-p99 is {max_p99:g}; expected milliseconds above 0, as 20.")
    allowed = Allowed(
        reduced_precision=reduced_precision,
        threads=_counts("--threads", threads),
        instances=_counts("--instances", instances),
        quick=quick,
    )
    folder = model.resolve()
    version, document = model_folder.completed(folder)
    if document.get("model_transaction_policy", {}).get("decoupled"):
        raise ToolError(
            f"model '{folder.name}' is decoupled; expected one that gives one answer to a request."
        )
    plan = Plan(
        folder=folder,
        version=version,
        document=document,
        allowed=allowed,
        limits=Limits(max_error, max_p99 or math.inf),
        goal=goal,
        inputs=inputs,
        timeout_s=timeout,
    )
    output = output or (None if dry_run else folder)
    _check(plan, output, json_path, dry_run=dry_run)
    tuning = Tuning(plan)
    stopped = _measure(tuning, deadline or (_QUICK_S if quick else None))
    choice = tuning.choice()
    saved = False
    if tuning.rows:
        saved = _report(tuning, choice, output, json_path)
    if choice is not None:
        _write_config(plan, choice, saved=saved, dry_run=dry_run)
    elif stopped is None:
        raise _no_choice(tuning)
    if stopped is not None:
        chosen = "the choice is the best so far" if choice else "config.pbtxt is as it was"
        _OUT.print(f"stopped before everything was measured; {chosen}")
        if choice is None or not isinstance(stopped, DeadlineReached):
            raise typer.Exit(_INTERRUPTED)


def _counts(option: str, text: str) -> tuple[int, ...]:
    words = [word for word in text.split(",") if word.strip()]
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ToolError(f"{option} is '{text}'; expected counts of at least 1, as 1,2,4.")
    return tuple(sorted({int(word) for word in words}))


def _check(plan: Plan, output: Path | None, json_path: Path | None, *, dry_run: bool) -> None:
    """Raise before the measurement, rather than after it, if the results cannot be written."""
    if plan.inputs is not None and not plan.inputs.is_file():
        raise ToolError(f"{plan.inputs} is not a file; expected inputs in safetensors.")
    if plan.automatic and output is not None and output.resolve() != plan.folder:
        raise ToolError(
            'config.pbtxt has OPTIMIZE "auto", which reads tuned.json in the model\'s folder;'
            " leave out --output, or change OPTIMIZE."
        )
    _edited(plan, plan.current())
    if output is not None:
        _check_writable(output)
        tuned_settings.read_choice(output, "")  # raises for a damaged tuned.json
    if json_path is not None:
        report.check_writable(json_path)
    if not dry_run and not plan.automatic:
        _check_writable(plan.folder)


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.check_writable(folder)
    except OSError as error:
        raise ToolError(
            f"cannot write into {folder}: {error.strerror or error}; --output names another"
            " folder for the findings, and --dry-run leaves config.pbtxt as it is."
        ) from error


def _measure(tuning: Tuning, deadline: float | None) -> Stopped | None:
    """Measure and print each candidate until the end; return what stopped it earlier."""
    columns = (
        SpinnerColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=_ERR, transient=True, disable=not _ERR.is_terminal) as progress:
        task = progress.add_task("the reference, in eager", total=None)

        def begin(candidate: Candidate) -> None:
            progress.update(task, description=str(candidate))

        def end(row: Row) -> None:
            remark = "untuned" if row is tuning.rows[0] else ""
            if row is tuning.choice() and not remark:
                remark = "best so far"
            _ERR.print(f"{report.tuning_line(row)}  {remark}".rstrip(), markup=False)

        interruption.raise_at_signals(deadline)
        try:
            tuning.run(begin, end)
        except Stopped as stopped:
            return stopped
        finally:
            interruption.ignore_signals()  # the results must be written
    return None


def _report(
    tuning: Tuning, choice: Row | None, output: Path | None, json_path: Path | None
) -> bool:
    """Print the results and write them; return whether tuned.json has the choice.

    An earlier choice is not replaced by none, nor by one from a part of the runtimes.
    """
    plan = tuning.plan
    if not _OUT.is_terminal:
        _OUT.width = max(_OUT.width, _WIDTH)
    _OUT.print(report.tuning_table(tuning.rows, plan.limits, choice), soft_wrap=False)
    for row in tuning.rows:
        if row.failure:
            _OUT.print(f"{row.candidate}: {row.failure}", markup=False)
    _OUT.print(
        f"inputs: {tuning.inputs}; batches of {tuning.batch}; tolerance {plan.limits.error:g};"
        f" chosen for {plan.goal.value}"
    )
    if note := report.instances_note(tuning.rows):
        _OUT.print(note)
    if choice is not None:
        _OUT.print(f"chosen: {report.tuning_line(choice)}", markup=False)
    if tuning.sizes:
        _OUT.print(report.sizes_table(tuning.sizes), soft_wrap=False)
        _OUT.print(report.best_size(tuning))
    entry = report.tuning_entry(tuning)
    if json_path is not None:
        report.write_json(json_path, entry)
        _OUT.print(f"wrote {json_path}")
    if output is None:
        return False
    earlier = tuned_settings.read_choice(output, tuned_settings.fingerprint(entry["machine"]))
    if earlier is not None and (choice is None or not tuning.screened):
        _OUT.print(f"{output / tuned_settings.FILE} keeps its earlier choice for this machine")
        return False
    _OUT.print(f"wrote {tuned_settings.save(output, entry)}")
    return True


def _edited(plan: Plan, candidate: Candidate) -> tuple[str, str]:
    """Return the text of config.pbtxt, and the text with a candidate's settings."""
    name = plan.folder.name
    text = pbtxt.text(plan.folder)
    config_editor.count(name, pbtxt.parse(name, text))
    parameters: dict[str, str | None] = {key: candidate.parameters.get(key) for key in TUNED}
    return text, config_editor.edit(name, text, parameters, candidate.instances)


def _write_config(plan: Plan, choice: Row, *, saved: bool, dry_run: bool) -> None:
    path = plan.folder / "config.pbtxt"
    chosen = escape(str(choice.candidate))
    if plan.automatic:
        takes = "takes" if saved else "would take"
        _OUT.print(
            f'{chosen}: OPTIMIZE "auto" {takes} it from {tuned_settings.FILE}; {path} is as it was'
        )
        return
    text, edited = _edited(plan, choice.candidate)
    if edited == text:
        _OUT.print(f"{chosen}: {path} has these settings already")
    elif dry_run:
        lines = difflib.unified_diff(
            text.splitlines(), edited.splitlines(), str(path), "tuned", lineterm=""
        )
        _OUT.print("\n".join(lines), markup=False)
    else:
        report.write(path, edited)
        _OUT.print(f"{chosen}: written into {path}")


def _no_choice(tuning: Tuning) -> ToolError:
    """Return an error with the reason why nothing was chosen."""
    plan = tuning.plan
    measured = [row for row in tuning.rows if row.rounds]
    if not measured:
        return ToolError(f"every candidate failed, the first with: {tuning.rows[0].failure}")
    closest = min(measured, key=lambda row: row.error)
    if closest.error <= plan.limits.error:
        fastest = min(measured, key=lambda row: row.p99_ms)
        return ToolError(
            f"no candidate of '{plan.document['name']}' is within --max-p99 {plan.limits.p99_ms:g};"
            f" the fastest is {fastest.candidate} with {fastest.p99_ms:.3g} ms for batches of"
            f" {fastest.batch}. Allow that much; config.pbtxt is as it was."
        )
    return ToolError(
        f"no candidate of '{plan.document['name']}' is within --max-error {plan.limits.error:g};"
        f" the closest is {closest.candidate} with {closest.error:.2g}. Allow that much, or look"
        " whether the model gives the same outputs twice; config.pbtxt is as it was."
    )
