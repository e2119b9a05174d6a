"""What the demo measured, as a table and as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from rich.table import Table

Pair: TypeAlias = tuple[float, float]
"""A figure of this backend, and of the models written by hand."""
Differences: TypeAlias = dict[str, Pair]

WAYS = ("torch-py-backend", "by hand")
COLORS = ("#5b9bd5", "#b8bcc2")
BASE_COLORS = ("#c3daf1", "#e2e4e7")


@dataclass(frozen=True)
class Recovery:
    """What happened after kill -9 of a network's instances.

    Attributes:
        seconds: the time until the model of this backend answered again.
        by_hand: whether the model written by hand answered then, too.
        others: the requests to another model meanwhile.
        failures: how many of them failed.
    """

    seconds: float
    by_hand: bool
    others: int
    failures: int


@dataclass(frozen=True)
class Figures:
    """What the steps measured. Pairs are of this backend and of the models written by hand.

    Attributes:
        differences: from eager PyTorch, by the network's name.
        memory: megabytes of four ResNet-50, and `base` of as many encoders, which are small.
        good: good requests answered beside bad ones, of `sent`.
        rates: requests per second of each turn.
        stream: seconds to the first and to the last character.
    """

    differences: Differences
    memory: Pair
    base: Pair
    good: tuple[int, int]
    sent: int
    rates: tuple[list[float], list[float]]
    stream: tuple[float, float]
    recovery: Recovery

    @property
    def above_base(self) -> Pair:
        """Return what the four ResNet-50 use beyond as many encoders."""
        (ours, by_hand), (our_base, base_by_hand) = self.memory, self.base
        return ours - our_base, by_hand - base_by_hand

    @property
    def ratio(self) -> str:
        """Return the ratio of the rates of each pair of turns: median (least to most)."""
        ratios = [ours / by_hand for ours, by_hand in zip(*self.rates, strict=True)]
        return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def table(figures: Figures) -> Table:
    """Return the figures as a table."""
    result = Table(title="Measured in this run", title_justify="left")
    result.add_column("")
    for way in WAYS:
        result.add_column(way, justify="right")

    for name, differences in figures.differences.items():
        result.add_row(f"{name}: largest difference from eager", *map(_small, differences))
    result.add_row("memory of four ResNet-50", *map(_megabytes, figures.memory))
    result.add_row("  beyond Python and PyTorch", *map(_megabytes, figures.above_base))
    result.add_row(
        "good requests answered beside bad ones",
        *(f"{count} of {figures.sent}" for count in figures.good),
    )
    result.add_row("encoder, requests/s", *(f"{median(turns):,.0f}" for turns in figures.rates))
    result.add_row("  ratio: median (least to most)", figures.ratio)
    first, last = figures.stream
    result.add_row("stream: first and last character", f"{first * 1e3:.0f} and {last * 1e3:.0f} ms")
    recovery = figures.recovery
    seconds = f"{recovery.seconds:.1f} s"
    by_hand = "answers" if recovery.by_hand else f"> {seconds}"
    result.add_row("kill -9 to the next answer", seconds, by_hand)
    failed = f"{recovery.failures} of {recovery.others}"
    result.add_row("  failed requests to another model", failed)
    return result


def _small(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def _megabytes(value: float) -> str:
    return f"{value:,.0f} MB"


def draw(figures: Figures, path: Path) -> None:
    """Save a picture: memory, answers beside bad requests, throughput."""
    # A Figure without pyplot needs no display.
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1)
    figure = Figure(figsize=(10, 4), layout=layout)
    memory, good, rates = figure.subplots(1, 3)
    _bars(memory, "Memory of four ResNet-50, MB", figures.memory)
    memory.bar(WAYS, figures.base, width=0.6, color=BASE_COLORS)
    for place, (base, total) in enumerate(zip(figures.base, figures.memory, strict=True)):
        memory.text(place, base / 2, "Python and\nPyTorch", ha="center", va="center", fontsize=9)
        memory.text(place, (base + total) / 2, "ResNet-50", ha="center", va="center", fontsize=9)
    _bars(good, f"Good requests answered\nbeside bad ones, of {figures.sent}", figures.good)
    medians = [median(turns) for turns in figures.rates]
    _bars(rates, f"Encoder, requests/s;\nratio {figures.ratio}", medians)
    figure.savefig(path, dpi=120)


def _bars(axes: Axes, title: str, values: Sequence[float]) -> None:
    """Draw one labelled bar for each way."""
    bars = axes.bar(WAYS, values, width=0.6, color=COLORS)
    axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3, fontsize=11)
    axes.set_title(title, fontsize=11)
    axes.set_ylim(0, 1.15 * max(*values, 1))
    axes.set_yticks([])
    axes.tick_params(length=0)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
