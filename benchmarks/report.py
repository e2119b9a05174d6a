"""The measurements as a Markdown document."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks import harness
from benchmarks.contenders import PEERS
from benchmarks.harness import Pair
from benchmarks.load_generator import Point
from benchmarks.models import MAX_BATCH_SIZE, MODELS
from benchmarks.tables import Spread, spread

FLOOR, TRANSFER, PLAIN, HTTP, RUNTIME = "floor", "transfer", "plain", "http", "runtime"
AOTI = "aoti"
LIBTORCH = "libtorch"
_IN_THE_SERVER = {
    FLOOR: "no-op floor",
    TRANSFER: "reads and writes only",
    PLAIN: "written by hand",
    AOTI: "AOTInductor",
    HTTP: "ours over HTTP",
    RUNTIME: "Triton's Python runtime",
}
_TITLES = (
    _IN_THE_SERVER
    | {LIBTORCH: "Triton's LibTorch backend"}
    | {name: peer.title for name, peer in PEERS.items()}
)
_SERVED = {
    FLOOR: "in the same server: a Python backend model that returns a prepared response",
    TRANSFER: "in the same server: a Python backend model that reads inputs, writes responses",
    AOTI: 'in the same server: the same network with OPTIMIZE "aoti"; ours runs it eagerly',
    PLAIN: "in the same server: a Python backend model for this network only, without checks",
    HTTP: "this backend in the same server, over HTTP",
    RUNTIME: "in the same server: model.py of Triton's PyTorch backend, which compiles the network",
    LIBTORCH: "TorchScript, in a tritonserver of its own; the same protocol",
} | {name: peer.words for name, peer in PEERS.items()}
_COLUMNS = (
    "model", "against", "concurrency", "ours ÷ other", "ours, /s", "other, /s",
    "ours, p50/p99 ms", "other, p50/p99 ms", "batch, ours/other", "client's core",
)  # fmt: skip

# The least median of the pairs, by model, contender and concurrency.
_LOADS = (1, 8, 32)
TARGETS = {
    **{("add", FLOOR, load): least for load, least in zip(_LOADS, (0.85, 0.9, 0.95), strict=True)},
    **{("add", PLAIN, load): 1.0 for load in _LOADS},
    **{("mlp", RUNTIME, load): 1.3 for load in _LOADS},
    **{(model, PLAIN, load): 0.99 for model in ("resnet18", "transformer") for load in _LOADS},
    **{("mlp", peer, 32): 2.0 for peer in PEERS},
}


@dataclass(frozen=True)
class Row:
    """One model against one other server at one concurrency."""

    model: str
    against: str
    concurrency: int
    pairs: tuple[Pair, ...]

    @property
    def ratio(self) -> Spread:
        """Our throughput as a multiple of the other's."""
        return spread(harness.ratios(self.pairs))

    def of_both(self, figure: Callable[[Point], float | None], form: str) -> tuple[str, str]:
        """Return the median of a figure over our turns, and over the other's."""
        texts = []
        for points in zip(*self.pairs, strict=True):
            values = [value for point in points if (value := figure(point)) is not None]
            texts.append(format(statistics.median(values), form) if values else "?")
        ours, other = texts
        return ours, other


@dataclass
class Report:
    """The results of one run of the command.

    Attributes:
        command: the command line.
        facts: machine, versions and settings by name.
        versions: versions of the peers by their keys.
        missing: the reason why something was not measured, by model and contender.
        interrupted: whether the run was interrupted.
    """

    command: str
    facts: dict[str, str]
    versions: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)
    interrupted: bool = False


def markdown(report: Report) -> str:
    """Return the whole document."""
    parts = [_head(report)]
    if report.rows:
        names = dict.fromkeys(row.model for row in report.rows)
        models = "; ".join(f"`{name}`: {MODELS[name].words}" for name in names)
        throughput = _table(_COLUMNS, [_cells(row) for row in report.rows])
        parts.append(f"## Throughput\n\n{models}.\n\n{throughput}")
    if targets := _targets(report):
        parts.append(_TARGETS + _table(("target", "measured", "met", "if not"), targets))
    if report.rows:
        others = dict.fromkeys(row.against for row in report.rows)
        served = [(_TITLES[name], report.versions.get(name, ""), _SERVED[name]) for name in others]
        parts.append("## How each is served\n\n" + _table(("server", "version", "how"), served))
    if report.missing:
        lines = [(model, name, _line(why)) for (model, name), why in report.missing.items()]
        parts.append("## Not measured\n\n" + _table(("model", "against", "why"), lines))
    return "\n\n".join(parts) + "\n"


_TARGETS = """\
## Targets

The floor neither reads inputs nor computes. All servers share the cores with the client.

"""


def _head(report: Report) -> str:
    """What this is, and where it was measured."""
    ended = "\n\nThe run was interrupted; what it had measured is below." * report.interrupted
    return f"""\
# Benchmarks

Written by `{report.command}`, on one machine on one day.{ended}

{_table(("condition", "value"), list(report.facts.items()))}

Each other server is loaded in turn with ours, A B A B …, after its responses were compared with
eager PyTorch. "ours ÷ other" is the ratio of throughputs within a pair: median (least..most); the
other figures are medians.

All servers form batches of at most {MAX_BATCH_SIZE}, with one instance (worker, replica) and the
same number of threads. One client sends requests of one row in a closed loop, over the other's best
protocol. "client's core" is the share of a core that it used, ours/other; near 1 it
limits the throughput. The idle server keeps running: LitServe then uses an eighth of a
core."""


def _cells(row: Row) -> Sequence[str]:
    throughputs = row.of_both(lambda point: point.result.throughput, ",.0f")
    p50, p99 = (row.of_both(partial(harness.latency_ms, share=share), ".2f") for share in (50, 99))
    median, _, extremes = row.ratio.text(2).partition(" ")
    return (
        row.model,
        _TITLES[row.against],
        str(row.concurrency),
        f"**{median}** {extremes}",
        *throughputs,
        *("/".join(latencies) for latencies in zip(p50, p99, strict=True)),
        "/".join(row.of_both(harness.rows_in_a_call, ".1f")),
        "/".join(row.of_both(lambda point: point.result.busy, ".2f")),
    )


def _targets(report: Report) -> list[Sequence[str]]:
    """Return the targets that were measured, with the result and, if missed, the reason."""
    targets: list[Sequence[str]] = []
    for row in report.rows:
        least = TARGETS.get((row.model, row.against, row.concurrency))
        if least is None:
            continue
        promise = f"{row.model}, {_TITLES[row.against]} at {row.concurrency}: at least {least:g}"
        measured, met = row.ratio.text(2), row.ratio.median >= least
        if row.against in PEERS:
            ours, other = row.of_both(partial(harness.latency_ms, share=99), ".2f")
            promise += ", p99 no worse"
            measured += f"; p99 {ours} against {other} ms"
            met = met and float(ours) <= float(other)
        reason = "" if met else _reason(row, least, report.rows)
        targets.append((promise, measured, "yes" if met else "**no**", reason))
    return targets


def _reason(row: Row, least: float, rows: Sequence[Row]) -> str:
    """Return what explains a missed target; empty: nothing that was measured."""
    if row.against in PEERS:
        busy = row.of_both(lambda point: point.result.busy, ".2f")
        return f"the client takes {busy[0]} and {busy[1]} of a core"
    if row.against != FLOOR:
        return "within the spread" if row.ratio.most >= least else ""
    others = {
        other.against: other.ratio.median
        for other in rows
        if (other.model, other.concurrency) == (row.model, row.concurrency)
    }
    # Each was measured against ours.
    shares = [
        f"{_TITLES[other]}: {row.ratio.median / others[other]:.2f}"
        for other in (TRANSFER, PLAIN)
        if other in others
    ]
    return "; ".join(shares)


def _line(text: str) -> str:
    """Return several lines as one cell."""
    return "<br>".join(line.replace("|", "\\|") for line in text.splitlines())


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table without spaces around the thousand cells."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"|{'|'.join(cells)}|" for cells in lines)
