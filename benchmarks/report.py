"""The measurements as a Markdown document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks import forward
from benchmarks.contenders import PEERS
from benchmarks.forward import Cost
from benchmarks.models import MAX_BATCH_SIZE, MODELS
from benchmarks.pairs import Pair, Spread, Turn, spread

FLOOR, PLAIN, HTTP, FORWARD = "floor", "plain", "http", "forward"
_OURSELVES = {FLOOR: "no-op floor", PLAIN: "written by hand", HTTP: "ours over HTTP"}
_TITLES = _OURSELVES | {name: peer.title for name, peer in PEERS.items()}
_SERVED = {
    FLOOR: "a Python backend model that returns a prepared response; the same server",
    PLAIN: "a Python backend model for this network only, without checks; the same server",
    HTTP: "this backend in the same server, over HTTP",
} | {name: peer.words for name, peer in PEERS.items()}
_COLUMNS = (
    "model", "against", "concurrency", "ours ÷ other", "ours, /s", "other, /s",
    "ours, p50 / p99 ms", "other, p50 / p99 ms", "batch, ours / other", "client's core",
)  # fmt: skip

# Targets of the median of the pairs.
FLOOR_SHARE = 0.95
FORWARD_SHARE = 0.05
PEER_MULTIPLE = 2.0
_PEERS_AT = ("mlp", 32)


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
        return spread([pair.ratio for pair in self.pairs])

    @property
    def ours(self) -> list[Turn]:
        """Our turns."""
        return [pair.ours for pair in self.pairs]

    @property
    def other(self) -> list[Turn]:
        """The other's turns."""
        return [pair.other for pair in self.pairs]


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
    costs: list[Cost] = field(default_factory=list)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)
    interrupted: bool = False


def markdown(report: Report) -> str:
    """Return the whole document."""
    parts = [_head(report)]
    if report.rows:
        parts.append(_throughput(report.rows))
    if report.costs:
        parts.append(_forward(report.costs))
    if targets := _targets(report):
        parts.append(_judged(targets))
    if served := _served(report):
        parts.append("## How each is served\n\n" + _table(("", "version", "how"), served))
    if report.missing:
        lines = [(model, name, _line(why)) for (model, name), why in report.missing.items()]
        parts.append("## Not measured\n\n" + _table(("model", "against", "why"), lines))
    return "\n\n".join(parts) + "\n"


def _head(report: Report) -> str:
    """What this is, and where it was measured."""
    ended = "\n\nThe run was interrupted; what it had measured is below." * report.interrupted
    return f"""\
# Benchmarks

Written by `{report.command}`. The figures are of one machine on one day.{ended}

{_table(("", ""), list(report.facts.items()))}

Two servers run at a time and get load in turn, A B A B …, after their responses were compared with
eager PyTorch. "ours ÷ other" is the ratio of throughputs within a pair: median (least..most). The
other figures are medians of the turns.

All servers form batches of at most {MAX_BATCH_SIZE} and run one instance (worker, replica) with
the same number of threads. One asyncio client sends requests of one row in a closed loop, to the
others over their best protocol. "client's core" is the share of a core that the client used for
ours and for the other; near 1 the client limits the throughput. The idle server is not stopped:
LitServe and Ray Serve use an eighth of a core when idle."""


def _throughput(rows: Sequence[Row]) -> str:
    words = "\n".join(
        f"- `{name}`: {MODELS[name].words}" for name in dict.fromkeys(row.model for row in rows)
    )
    return f"## Throughput\n\n{words}\n\n" + _table(_COLUMNS, [_cells(row) for row in rows])


def _cells(row: Row) -> Sequence[str]:
    ratio = row.ratio
    return (
        row.model,
        _TITLES[row.against],
        str(row.concurrency),
        f"**{ratio.median:.2f}** ({ratio.least:.2f}..{ratio.most:.2f})",
        _throughputs(row.ours),
        _throughputs(row.other),
        _latencies(row.ours),
        _latencies(row.other),
        f"{_batches(row.ours)} / {_batches(row.other)}",
        f"{_busy(row.ours)} / {_busy(row.other)}",
    )


def _throughputs(turns: Sequence[Turn]) -> str:
    return f"{_middle([one.throughput for one in turns]):,.0f}"


def _latencies(turns: Sequence[Turn]) -> str:
    p50, p99 = _middle([one.p50 for one in turns]), _middle([one.p99 for one in turns])
    return f"{p50 * 1e3:.2f} / {p99 * 1e3:.2f}"


def _batches(turns: Sequence[Turn]) -> str:
    batches = [turn.batch for turn in turns if turn.batch is not None]
    return f"{_middle(batches):.1f}" if batches else "?"


def _busy(turns: Sequence[Turn]) -> str:
    return f"{_middle([one.busy for one in turns]):.2f}"


def _middle(values: list[float]) -> float:
    return spread(values).median


def _forward(costs: Sequence[Cost]) -> str:
    return f"""\
## Around the forward

Measured in the instance: `execute`, all of the backend's work for a batch; the engine, which
gathers, binds, checks and scatters; and the model's forward. "engine" and "messages" exclude nested
times. "share" is their part of "request", Triton's time for a request including the queue.

{forward.table(costs)}"""


@dataclass(frozen=True)
class _Target:
    """A target and its result.

    Attributes:
        reason: why it is missed, and what would be needed.
    """

    promise: str
    measured: str
    met: bool
    reason: str


def _targets(report: Report) -> list[_Target]:
    """Return the targets that were measured."""
    targets = []
    for row in report.rows:
        if row.against == FLOOR and row.model == "add":
            targets.append(_target_of_floor(row, report.rows))
        if row.against in PEERS and (row.model, row.concurrency) == _PEERS_AT:
            targets.append(_target_of_peer(row))
    return [*targets, *map(_target_around_forward, report.costs)]


def _target_of_floor(row: Row, rows: Sequence[Row]) -> _Target:
    ratio = row.ratio.median
    place = (row.model, PLAIN, row.concurrency)
    by_hand = [
        f" The model written by hand, without checks, reaches {ratio / one.ratio.median:.2f}."
        for one in rows
        if (one.model, one.against, one.concurrency) == place
    ]
    return _Target(
        f"add: at least {FLOOR_SHARE} of the floor at concurrency {row.concurrency}",
        f"{ratio:.2f}",
        ratio >= FLOOR_SHARE,
        "The floor reads no input and sends a prepared response, without most of the cost of"
        f" Triton's Python API.{''.join(by_hand)} The target needs a stub that passes a batch in"
        " one call.",
    )


def _target_of_peer(row: Row) -> _Target:
    ratio = row.ratio.median
    ours, other = (_middle([one.p99 for one in turns]) for turns in (row.ours, row.other))
    return _Target(
        f"{row.model}: at least {PEER_MULTIPLE:g} x {_TITLES[row.against]} at concurrency"
        f" {row.concurrency}, p99 no worse",
        f"{ratio:.2f} x; p99 {ours * 1e3:.2f} against {other * 1e3:.2f} ms",
        ratio >= PEER_MULTIPLE and ours <= other,
        "Both run the same forward and share the cores with the client, which takes"
        f" {_busy(row.ours)} and {_busy(row.other)} of one. A better measurement needs separate"
        " cores.",
    )


def _target_around_forward(cost: Cost) -> _Target:
    around = cost.engine + cost.messages
    return _Target(
        f"{cost.model}: at most {FORWARD_SHARE:.0%} of a request around the forward"
        f" at concurrency {cost.concurrency}",
        f"{cost.share:.1%}",
        cost.share <= FORWARD_SHARE,
        f"A batch of {cost.batch:.1f} costs {around * 1e3:.2f} ms around the forward,"
        f" {cost.messages * 1e3:.2f} of them in Triton's Python API. Requests of"
        f" {around / FORWARD_SHARE * 1e3:.1f} ms would be needed; these take"
        f" {cost.request * 1e3:.1f}.",
    )


def _judged(targets: Sequence[_Target]) -> str:
    """Return a table of the targets and the reasons of those that are missed."""
    rows = [(one.promise, one.measured, "yes" if one.met else "**no**") for one in targets]
    reasons = "".join(f"\n- {one.promise}: {one.reason}" for one in targets if not one.met)
    missed = f"\n\nWhat is missed, why, and what would be needed:\n{reasons}" * bool(reasons)
    return "## Targets\n\n" + _table(("target", "measured", "met"), rows) + missed


def _served(report: Report) -> list[Sequence[str]]:
    named = dict.fromkeys(row.against for row in report.rows)
    return [(_TITLES[one], report.versions.get(one, ""), _SERVED[one]) for one in named]


def _line(text: str) -> str:
    """Return several lines as one cell."""
    return "<br>".join(line.replace("|", "\\|") for line in text.splitlines())


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
