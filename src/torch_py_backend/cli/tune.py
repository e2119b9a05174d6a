"""`torch-py-backend tune`: measures settings for a model, and writes the best into its config."""

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

# Rounding of float32, in another order of the sums. 16-bit types keep two or three digits.
_MAX_ERROR = 1e-4
_MAX_ERROR_REDUCED = 3e-2
_ROUNDS, _ROUNDS_QUICK = 3, 1
_SECONDS, _SECONDS_QUICK = 0.5, 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended
_OUT = Console(highlight=False, emoji=False, soft_wrap=True)
_ERR = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
# For the table, where a log or a pipe sets no width.
_WIDTH = 100


class _Stopped(Exception):  # noqa: N818  no error: the user's wish
    """SIGTERM or Ctrl-C."""


def tune(
    model: Annotated[Path, typer.Argument(help="The model's folder.")],
    prefer: Annotated[
        Prefer, typer.Option(help="What is chosen by, among what is accurate enough.")
    ] = Prefer.THROUGHPUT,
    max_error: Annotated[
        float | None,
        typer.Option(
            help="The largest difference from eager that is accepted, relative to the output's"
            f" values. By default {_MAX_ERROR:g}; with --reduced-precision {_MAX_ERROR_REDUCED:g}."
        ),
    ] = None,
    reduced_precision: Annotated[
        bool, typer.Option("--reduced-precision", help="Also try 16-bit types.")
    ] = False,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Inputs by name, in safetensors; by default the model's example_inputs, else"
            " made-up values."
        ),
    ] = None,
    threads: Annotated[
        str, typer.Option(help="Counts of threads to try, as 1,2,4; by default what fits.")
    ] = "",
    instances: Annotated[
        str, typer.Option(help="Counts of instances to try, as 1,2; by default what fits.")
    ] = "",
    quick: Annotated[
        bool,
        typer.Option("--quick", help="The runtimes only, with one instance, measured once."),
    ] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="How often each candidate is measured.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds for each candidate in a round.")
    ] = 600.0,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Where tuned.json and tuned.png go; by default the model's folder, and with"
            " --dry-run nowhere."
        ),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write this run's findings there, too.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the change of config.pbtxt; write nothing.")
    ] = False,
) -> None:
    """Measure runtimes, threads and instances for a model, and write the best into its config."""
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
    keeping = _Keeping(output or (None if dry_run else folder), json_path, dry_run)
    _refuse_before(plan, keeping)
    tuning, stopped = _measure(plan)
    choice = ranking.choose(tuning.rows, plan.max_error, plan.prefer) if tuning.screened else None
    if tuning.rows:
        _keep(tuning, keeping, choice)
    if choice is not None:
        _write(plan, keeping, choice)
    elif not stopped:
        raise _none_fits(tuning)
    else:
        _OUT.print("stopped before every runtime was measured; config.pbtxt is as it was")
    raise typer.Exit(_INTERRUPTED if stopped else 0)


def _counts(option: str, text: str) -> tuple[int, ...]:
    words = [word for word in text.split(",") if word.strip()]
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise TuneError(f"{option} is '{text}'; expected counts of at least 1, as 1,2,4.")
    return tuple(sorted({int(word) for word in words}))


def _tolerance(given: float | None, allowed: Allowed) -> float:
    if given is None:
        return _MAX_ERROR_REDUCED if allowed.reduced_precision else _MAX_ERROR
    if not (math.isfinite(given) and given >= 0):
        raise TuneError(f"--max-error is {given:g}; expected a number of at least 0, as 1e-4.")
    return given


@dataclass(frozen=True, slots=True)
class _Keeping:
    """Where the findings go; without a folder they are only printed."""

    folder: Path | None
    json_path: Path | None
    dry_run: bool


def _document(folder: Path) -> dict[str, Any]:
    """The model's config, completed as a server would."""
    document = pbtxt.read(folder)
    if completion.needed(document):
        given = pbtxt.arguments(folder, repository.latest(folder), document)
        completion.complete(given, document)
    else:
        completion.decide(document, folder / repository.latest(folder))
    if document.get("model_transaction_policy", {}).get("decoupled"):
        raise TuneError(
            f"model '{folder.name}' is decoupled; expected one that gives one answer to a request."
        )
    return document


def _refuse_before(plan: Plan, keeping: _Keeping) -> None:
    """What would come out only after the measuring."""
    if plan.inputs is not None and not plan.inputs.is_file():
        raise TuneError(f"{plan.inputs} is not a file; expected inputs in safetensors.")
    if plan.automatic and keeping.folder is not None and keeping.folder.resolve() != plan.folder:
        raise TuneError(
            'config.pbtxt has OPTIMIZE "auto", which reads tuned.json in the model\'s folder;'
            " leave out --output, or change OPTIMIZE."
        )
    _edited(plan, plan.current())
    if keeping.folder is not None:
        tuned_settings.refuse_unwritable(keeping.folder)
        tuned_settings.chosen(keeping.folder, "")  # a damaged tuned.json, too
    if keeping.json_path is not None:
        tuned_settings.refuse_unwritable(keeping.json_path.absolute().parent)
    if not keeping.dry_run and not plan.automatic:
        tuned_settings.refuse_unwritable(plan.folder)
    if keeping.folder is not None and not tuning_report.can_plot():
        _ERR.print("no plot: matplotlib is missing; pip install 'torch-py-backend[tune]'")


def _measure(plan: Plan) -> tuple[Tuning, bool]:
    """The measurements, and whether the user cut them short."""
    columns = (
        TextColumn("{task.fields[step]}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    visible = _ERR.is_terminal
    with Progress(*columns, console=_ERR, transient=True, disable=not visible) as progress:
        bar = progress.add_task("the reference, in eager", total=None, step="")

        def tell(candidate: Candidate, done: int, total: int) -> None:
            step = f"{done + 1}/{total}"
            progress.update(bar, description=str(candidate), completed=done, total=total, step=step)
            if not visible:
                _ERR.print(f"{step} {candidate}", markup=False)

        tuning = Tuning(plan, tell)
        before = {number: signal.signal(number, _stop) for number in _SIGNALS}
        try:
            tuning.run()
        except _Stopped:
            return tuning, True
        finally:
            # From here on the findings are written, which a second Ctrl-C must not cut short.
            for number in before:
                signal.signal(number, signal.SIG_IGN)
    return tuning, False


def _stop(_number: int, _frame: FrameType | None) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise _Stopped


def _keep(tuning: Tuning, keeping: _Keeping, choice: Row | None) -> None:
    """Print the table; save it, unless it holds no choice and the one that is there does."""
    plan = tuning.plan
    if not _OUT.is_terminal:
        _OUT.width = max(_OUT.width, _WIDTH)
    _OUT.print(tuning_report.table(tuning.rows, plan.max_error, choice), soft_wrap=False)
    for sentence in tuning_report.failures(tuning.rows):
        _OUT.print(sentence, markup=False)
    _OUT.print(f"inputs: {tuning.inputs}; tolerance {plan.max_error:g}; by {plan.prefer.value}")
    machine = tuned_settings.machine()
    entry = tuning_report.entry(machine, tuning.rows, choice, _conditions(tuning))
    if keeping.json_path is not None:
        tuned_settings.replace(keeping.json_path, json.dumps(entry, indent=2).encode())
        _OUT.print(f"wrote {keeping.json_path}")
    if keeping.folder is None:
        return
    if (
        choice is None
        and tuned_settings.chosen(keeping.folder, tuned_settings.fingerprint(machine)) is not None
    ):
        _OUT.print(
            f"{keeping.folder / tuned_settings.FILE} keeps its earlier choice for this machine"
        )
        return
    _OUT.print(f"wrote {tuned_settings.keep(keeping.folder, entry)}")
    if tuning_report.can_plot():
        path = keeping.folder / tuning_report.PLOT
        title = f"{plan.document['name']} on {machine['processor']}, {machine['cores']} cores"
        tuning_report.plot(path, title, tuning.rows, plan.max_error, choice)
        _OUT.print(f"wrote {path}")


def _conditions(tuning: Tuning) -> dict[str, Any]:
    plan = tuning.plan
    return {
        "inputs": tuning.inputs,
        "max_error": plan.max_error,
        "prefer": plan.prefer.value,
        "rounds": plan.rounds,
        "seconds": plan.seconds,
        "allowed": asdict(plan.allowed),
    }


def _edited(plan: Plan, candidate: Candidate) -> tuple[str, str]:
    """The text of config.pbtxt, and the text with a candidate's settings."""
    name = plan.folder.name
    written = pbtxt.text(plan.folder)
    config_editor.count(name, pbtxt.parse(name, written))
    wished: dict[str, str | None] = {key: candidate.parameters.get(key) for key in TUNED}
    return written, config_editor.edit(name, written, wished, candidate.instances)


def _write(plan: Plan, keeping: _Keeping, choice: Row) -> None:
    path = plan.folder / "config.pbtxt"
    chosen = escape(str(choice.candidate))
    if plan.automatic:
        takes = "would take" if keeping.folder is None else "takes"
        _OUT.print(
            f'{chosen}: OPTIMIZE "auto" {takes} it from {tuned_settings.FILE}; {path} is as it was'
        )
        return
    written, edited = _edited(plan, choice.candidate)
    if edited == written:
        _OUT.print(f"{chosen}: {path} has these settings already")
        return
    if keeping.dry_run:
        lines = difflib.unified_diff(
            written.splitlines(), edited.splitlines(), str(path), "tuned", lineterm=""
        )
        _OUT.print("\n".join(lines), markup=False)
        return
    tuned_settings.replace(path, edited.encode())
    _OUT.print(f"{chosen}: written into {path}")


def _none_fits(tuning: Tuning) -> TuneError:
    """Why nothing was chosen, and what would change that."""
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
