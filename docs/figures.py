"""The table and the plot in the performance guide, made from docs/benchmarks.md.

python docs/figures.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

_DOCS = Path(__file__).parent
BENCHMARKS = _DOCS / "benchmarks.md"
GUIDE = _DOCS / "performance.md"
PLOT = _DOCS / "throughput.svg"
_TABLE = re.compile(r"(<!-- batching:[^\n]*-->\n)(.*?)(<!-- end of batching -->)", flags=re.DOTALL)
_RATIO = re.compile(r"\*\*([\d.]+)\*\* \(([\d.]+)\.\.([\d.]+)\)")
_FLOOR = "no-op floor"  # measured for every model
_LEAST_RATIO = 0.3  # models that compute are far below the floor


@dataclass(frozen=True)
class Comparison:
    """A row of the throughput table, as text."""

    model: str
    against: str
    concurrency: int
    median: str
    least: str
    most: str
    ours: str
    batch: str


def comparisons() -> list[Comparison]:
    """Return the rows of the throughput table."""
    found = []
    for line in BENCHMARKS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        ratio = _RATIO.fullmatch(cells[3]) if len(cells) > 3 else None  # noqa: PLR2004  the fourth
        if ratio is not None:
            model, against, concurrency, _, ours, *_, batches, _ = cells
            rows = batches.partition("/")[0].strip()
            median, least, most = ratio[1], ratio[2], ratio[3]
            found.append(
                Comparison(model, against, int(concurrency), median, least, most, ours, rows)
            )
    return found


def table() -> str:
    """Return the table of throughputs at the lowest and highest concurrency."""
    lines = ["| model | requests/s at {0} | at {1} | rows in a call at {1} |", "|---|---|---|---|"]
    rows = [one for one in comparisons() if one.against == _FLOOR]
    least, most = min(one.concurrency for one in rows), max(one.concurrency for one in rows)
    for model in dict.fromkeys(one.model for one in rows):
        by_load = {one.concurrency: one for one in rows if one.model == model}
        crowd = by_load[most]
        lines.append(f"| {model} | {by_load[least].ours} | {crowd.ours} | {crowd.batch} |")
    return "\n".join([lines[0].format(least, most), *lines[1:]])


def table_in_guide() -> str:
    match = _TABLE.search(GUIDE.read_text(encoding="utf-8"))
    return match[2].strip() if match else ""


def draw(path: Path) -> None:
    """Draw throughput relative to other servers, with the range of the pairs."""
    # Reproducible output, with text as text.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "figures", "font.size": 9}):
        _figure().savefig(path, metadata={"Date": None, "Description": description()})


def description() -> str:
    """Return the content of the plot as text."""
    return "; ".join(
        f"{one.model} against {one.against}, {one.concurrency}: {one.median}"
        for one in comparisons()
    )


def _figure() -> Figure:
    rows = comparisons()
    models = list(dict.fromkeys(one.model for one in rows))
    others = list(dict.fromkeys(one.against for one in rows))[::-1]
    loads = sorted({one.concurrency for one in rows})
    figure = Figure(figsize=(8, 0.42 * len(others) + 1.2), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False, sharex=True, sharey=True)[0]
    for axes, model in zip(panels, models, strict=True):
        for number, load in enumerate(loads):
            shown = [one for one in rows if (one.model, one.concurrency) == (model, load)]
            values = [float(one.median) for one in shown]
            # Side by side, the least load above.
            places = [
                others.index(one.against) + 0.22 * (len(loads) // 2 - number) for one in shown
            ]
            spread = [
                [value - float(one.least) for value, one in zip(values, shown, strict=True)],
                [float(one.most) - value for value, one in zip(values, shown, strict=True)],
            ]
            axes.errorbar(
                values,
                places,
                xerr=spread,
                fmt="o",
                color=f"C{number}",
                markersize=3.5,
                elinewidth=1,
                label=f"{load} outstanding",
            )
        axes.axvline(1, color="#333333", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlim(left=_LEAST_RATIO)
        axes.set_xticks([0.5, 1, 2, 5], ["0.5", "1", "2", "5"])
        axes.xaxis.set_minor_formatter("")
        axes.grid(visible=True, axis="x", linewidth=0.3)
        axes.set_title(model)
    panels[0].set_yticks(range(len(others)), others)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(loads))
    figure.supxlabel("requests/s, ours ÷ other; right of 1 ours is quicker")
    return figure


def main() -> None:
    written = GUIDE.read_text(encoding="utf-8")
    GUIDE.write_text(
        _TABLE.sub(lambda old: f"{old[1]}{table()}\n{old[3]}", written), encoding="utf-8"
    )
    draw(PLOT)


if __name__ == "__main__":
    main()
