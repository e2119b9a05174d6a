"""`torch-py-backend tune`: measure settings for a model and write the best into its config."""

from __future__ import annotations

import difflib
import json
import math
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from torch_py_backend.artifacts import repository
from torch_py_backend.autocomplete import completion
from torch_py_backend.config import pbtxt, tuned_settings
from torch_py_backend.errors import TuneError
from torch_py_backend.tools import config_editor, ranking, tuning_report
from torch_py_backend.tools.candidates import TUNED, Allowed, Candidate
from torch_py_backend.tools.ranking import Prefer, Row
from torch_py_backend.tools.tuning import Plan, Tuning

# Rounding of float32 with another order of sums; 16-bit types keep two or three digits.
_MAX_ERROR = 1e-4
_MAX_ERROR_REDUCED = 3e-2
_ROUNDS, _ROUNDS_QUICK = 3, 1
_SECONDS, _SECONDS_QUICK = 0.5, 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_INTERRUPTED = 130  # the exit code of a command that Ctrl-C stopped
_OUT = Console(highlight=False, emoji=False, soft_wrap=True)
_ERR = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
# Of the table, if the output is not a terminal.
_WIDTH = 100


class _Stopped(Exception):  # noqa: N818  not an error
    """SIGTERM or Ctrl-C."""


def tune(
    model: Annotated[Path, typer.Argument(help="The model's folder.")],
    prefer: Annotated[
        Prefer, typer.Option(help="The quantity that the choice maximizes or minimizes.")
    ] = Prefer.THROUGHPUT,
    max_error: Annotated[
        float | None,
        typer.Option(
            help="The largest accepted difference from eager, relative to the output's"
            f" values. By default {_MAX_ERROR:g}; with --reduced-precision {_MAX_ERROR_REDUCED:g}."
        ),
    ] = None,
    reduced_precision: Annotated[
        bool, typer.Option("--reduced-precision", help="Also try 16-bit types.")
    ] = False,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Inputs by name as safetensors; by default the model's example_inputs, else"
            " made-up values."
        ),
    ] = None,
    threads: Annotated[
        str, typer.Option(help="Numbers of threads to try: 1,2,4. By default those that fit.")
    ] = "",
    instances: Annotated[
        str, typer.Option(help="Numbers of instances to try: 1,2. By default those that fit.")
    ] = "",
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Try the runtimes only, with one instance, once."),
    ] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Measurements of each candidate.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Time limit of a candidate in a round, in seconds.")
    ] = 600.0,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder of tuned.json and tuned.png; by default the model's folder, and none with"
            " --dry-run."
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
        raise TuneError(f"{model} is not a folder; expected a model's folder.")
    allowed = Allowed(
        reduced_precision, _counts("--threads", threads), _counts("--instances", instances), quick
    )
    if quick and (allowed.threads or allowed.instances):
        raise TuneError("--quick tries one count of threads and instances; leave out one of them.")
    folder = model.resolve()
    plan = Plan(
        folder=folder,
        version=repository.latest(folder),
        document=_document(folder),
        allowed=allowed,
        max_error=_tolerance(max_error, allowed),
        prefer=prefer,
        inputs=inputs,
        rounds=rounds or (_ROUNDS_QUICK if quick else _ROUNDS),
        seconds=_SECONDS_QUICK if quick else _SECONDS,
        timeout_s=timeout,
    )
    results = _Results(output or (None if dry_run else folder), json_path, dry_run)
    _check(plan, results)
    tuning, stopped = _measure(plan)
    choice = ranking.choose(tuning.rows, plan.max_error, plan.prefer) if tuning.screened else None
    if tuning.rows:
        _save(tuning, results, choice)
    if choice is not None:
        _write_config(plan, results, choice)
    elif not stopped:
        raise _no_choice(tuning)
    else:
        _OUT.print("stopped before every runtime was measured; config.pbtxt is as it was")
    raise typer.Exit(_INTERRUPTED if stopped else 0)


def _counts(option: str, text: str) -> tuple[int, ...]:
    words = [word for word in text.split(",") if word.strip()]
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise TuneError(f"{option} is '{text}'; expected counts of at least 1, as 1,2,4.")
    return tuple(sorted({int(word) for word in words}))


def _tolerance(max_error: float | None, allowed: Allowed) -> float:
    if max_error is None:
        return _MAX_ERROR_REDUCED if allowed.reduced_precision else _MAX_ERROR
    if not (math.isfinite(max_error) and max_error >= 0):
        raise TuneError(f"--max-error is {max_error:g}; expected a number of at least 0, as 1e-4.")
    return max_error


@dataclass(frozen=True, slots=True)
class _Results:
    """The folder of tuned.json and tuned.png, if they are written, and other outputs."""

    folder: Path | None
    json_path: Path | None
    dry_run: bool


def _document(folder: Path) -> dict[str, Any]:
    """Return the model's config, completed as by a server."""
    document = pbtxt.read(folder)
    if completion.is_incomplete(document):
        arguments = pbtxt.arguments(folder, repository.latest(folder), document)
        completion.complete(arguments, document)
    else:
        completion.set_decoupled(document, folder / repository.latest(folder))
    if document.get("model_transaction_policy", {}).get("decoupled"):
        raise TuneError(
            f"model '{folder.name}' is decoupled; expected one that gives one answer to a request."
        )
    return document


def _check(plan: Plan, results: _Results) -> None:
    """Raise before the measurement, rather than after it, if the results cannot be written."""
    if plan.inputs is not None and not plan.inputs.is_file():
        raise TuneError(f"{plan.inputs} is not a file; expected inputs in safetensors.")
    if plan.automatic and results.folder is not None and results.folder.resolve() != plan.folder:
        raise TuneError(
            'config.pbtxt has OPTIMIZE "auto", which reads tuned.json in the model\'s folder;'
            " leave out --output, or change OPTIMIZE."
        )
    _edited(plan, plan.current())
    if results.folder is not None:
        tuned_settings.check_writable(results.folder)
        tuned_settings.read_choice(results.folder, "")  # raises for a damaged tuned.json
    if results.json_path is not None:
        tuned_settings.check_writable(results.json_path.absolute().parent)
    if not results.dry_run and not plan.automatic:
        tuned_settings.check_writable(plan.folder)
    if results.folder is not None and not tuning_report.can_plot():
        _ERR.print("no plot: matplotlib is missing; pip install 'torch-py-backend[tune]'")


def _measure(plan: Plan) -> tuple[Tuning, bool]:
    """Return the measurements, and whether a signal stopped them."""
    columns = (
        TextColumn("{task.fields[step]}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    visible = _ERR.is_terminal
    with Progress(*columns, console=_ERR, transient=True, disable=not visible) as progress:
        bar = progress.add_task("the reference, in eager", total=None, step="")

        def show(candidate: Candidate, done: int, total: int) -> None:
            step = f"{done + 1}/{total}"
            progress.update(bar, description=str(candidate), completed=done, total=total, step=step)
            if not visible:
                _ERR.print(f"{step} {candidate}", markup=False)

        tuning = Tuning(plan, show)
        for number in _SIGNALS:
            signal.signal(number, _stop)
        try:
            tuning.run()
        except _Stopped:
            return tuning, True
        finally:
            _ignore_signals()  # a second Ctrl-C must not interrupt the writing of the results
    return tuning, False


def _stop(_number: int, _frame: FrameType | None) -> None:
    _ignore_signals()
    raise _Stopped


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _save(tuning: Tuning, results: _Results, choice: Row | None) -> None:
    """Print the table and save it, unless that would replace a choice by none."""
    plan = tuning.plan
    if not _OUT.is_terminal:
        _OUT.width = max(_OUT.width, _WIDTH)
    _OUT.print(tuning_report.table(tuning.rows, plan.max_error, choice), soft_wrap=False)
    for sentence in tuning_report.failures(tuning.rows):
        _OUT.print(sentence, markup=False)
    _OUT.print(f"inputs: {tuning.inputs}; tolerance {plan.max_error:g}; by {plan.prefer.value}")
    machine = tuned_settings.machine_facts()
    conditions = {
        "inputs": tuning.inputs,
        "max_error": plan.max_error,
        "prefer": plan.prefer.value,
        "rounds": plan.rounds,
        "seconds": plan.seconds,
        "allowed": asdict(plan.allowed),
    }
    entry = tuning_report.entry(machine, tuning.rows, choice, conditions)
    if results.json_path is not None:
        tuned_settings.write_atomically(results.json_path, json.dumps(entry, indent=2).encode())
        _OUT.print(f"wrote {results.json_path}")
    if results.folder is None:
        return
    fingerprint = tuned_settings.fingerprint(machine)
    if choice is None and tuned_settings.read_choice(results.folder, fingerprint) is not None:
        _OUT.print(
            f"{results.folder / tuned_settings.FILE} keeps its earlier choice for this machine"
        )
        return
    _OUT.print(f"wrote {tuned_settings.save(results.folder, entry)}")
    if tuning_report.can_plot():
        path = results.folder / tuning_report.PLOT
        title = f"{plan.document['name']} on {machine['processor']}, {machine['cores']} cores"
        tuning_report.plot(path, title, tuning.rows, plan.max_error, choice)
        _OUT.print(f"wrote {path}")


def _edited(plan: Plan, candidate: Candidate) -> tuple[str, str]:
    """Return the text of config.pbtxt, and the text with a candidate's settings."""
    name = plan.folder.name
    text = pbtxt.text(plan.folder)
    config_editor.count(name, pbtxt.parse(name, text))
    parameters: dict[str, str | None] = {key: candidate.parameters.get(key) for key in TUNED}
    return text, config_editor.edit(name, text, parameters, candidate.instances)


def _write_config(plan: Plan, results: _Results, choice: Row) -> None:
    path = plan.folder / "config.pbtxt"
    chosen = escape(str(choice.candidate))
    if plan.automatic:
        takes = "would take" if results.folder is None else "takes"
        _OUT.print(
            f'{chosen}: OPTIMIZE "auto" {takes} it from {tuned_settings.FILE}; {path} is as it was'
        )
        return
    text, edited = _edited(plan, choice.candidate)
    if edited == text:
        _OUT.print(f"{chosen}: {path} has these settings already")
        return
    if results.dry_run:
        lines = difflib.unified_diff(
            text.splitlines(), edited.splitlines(), str(path), "tuned", lineterm=""
        )
        _OUT.print("\n".join(lines), markup=False)
        return
    tuned_settings.write_atomically(path, edited.encode())
    _OUT.print(f"{chosen}: written into {path}")


def _no_choice(tuning: Tuning) -> TuneError:
    """Return an error with the reason why nothing was chosen."""
    plan = tuning.plan
    measured = [row for row in tuning.rows if row.rounds]
    if not measured:
        reasons = {row.failure for row in tuning.rows}
        return TuneError(f"every candidate failed, the first with: {min(reasons)}")
    closest = min(measured, key=lambda row: row.error)
    return TuneError(
        f"no candidate of '{plan.document['name']}' is within --max-error {plan.max_error:g}; the"
        f" closest is {closest.candidate} with {closest.error:.2g}. Allow that much, or look"
        " whether the model gives the same outputs twice; config.pbtxt is as it was."
    )
