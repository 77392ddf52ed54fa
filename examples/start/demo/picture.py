"""The demo's picture: the gains as bars, next to a timeline of rustloader at work. Needs matplotlib."""

from __future__ import annotations

import tempfile
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from demo.measure import NO_WORKERS, OURS, STEP, TORCH, Result, Timeline
from demo.settings import Settings
from demo.text import rate, times
from demo.workloads import Workload

__all__ = ["draw", "write"]

INK = "#333333"
# Okabe and Ito's colors, which color-blind people can distinguish.
COLORS = {NO_WORKERS: "#777777", TORCH: "#D55E00", OURS: "#0072B2"}
GROUP = 4.4  # height of a workload's group, in bars: its title, three bars, a gap
# The color and the words for each kind of span in the timeline.
SPANS = {
    "fetch": ("#56B4E9", "worker: fetch"),
    "collate": ("#0072B2", "worker: collate"),
    "send": ("#009E73", "worker: send"),
    "next": ("#E69F00", "main: in next()"),
    "step": ("#BBBBBB", "main: training step"),
}
WIDTH = 1.17  # width of the part with the bars; the longest bar is 1, and its rate is next to it


def write(results: list[Result], timeline: Timeline, pictured: Workload, settings: Settings) -> None:
    """Draws the picture, and writes it to the file that the settings name."""
    figure = draw(results, timeline, pictured)
    # Text is written as outlines, because a reader's machine may lack the font. IDs are fixed and the date is left out,
    # so that equal pictures give equal files.
    with matplotlib.rc_context({"svg.hashsalt": "rustloader", "svg.fonttype": "path"}):
        with tempfile.TemporaryDirectory(dir=settings.plot.absolute().parent) as unfinished:
            new = Path(unfinished) / settings.plot.name
            figure.savefig(new, metadata={"Date": None} if new.suffix == ".svg" else None)
            new.replace(settings.plot)


def draw(results: list[Result], timeline: Timeline, pictured: Workload) -> Figure:
    """Draws and returns the figure.

    Args:
        results: the results; each gets a group of bars.
        timeline: the timeline of rustloader.
        pictured: the workload of the timeline.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)  # inches
    figure = Figure(figsize=(11, max(5.6, 1.3 * len(results))), dpi=160, layout=layout, facecolor="white")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.3), wspace=0.04)[0]

    left.suptitle("Batches per second (line: range of the rounds)", fontsize=12, color=INK)
    gains = left.subplots()
    _draw_gains(gains, results)
    labels = {NO_WORKERS: "torch, no workers", TORCH: "torch", OURS: "rustloader"}
    _draw_legend(left, [Patch(color=COLORS[name], label=label) for name, label in labels.items()])

    title = f"rustloader at work: {pictured.name.lower()}, a training step of {STEP * 1e3:.0f} ms"
    right.suptitle(title, fontsize=12, color=INK)
    _draw_timeline(right.subplots(), timeline)
    _draw_legend(right, [Patch(color=color, label=label) for color, label in SPANS.values()])
    return figure


def _draw_legend(part: SubFigure, patches: list[Patch]) -> None:
    part.legend(
        handles=patches,
        loc="outside lower center",
        ncols=3,
        handlelength=1,
        columnspacing=1.2,
        frameon=False,
        fontsize=9.5,
        labelcolor=INK,
    )


def _draw_gains(panel: Axes, results: list[Result]) -> None:
    for group, result in enumerate(results):
        top = GROUP * group
        panel.text(0, top, result.workload.name, fontsize=11, fontweight="bold", color=INK, va="center")
        gain = result.ratio(OURS, TORCH)
        words = "no measurable difference" if gain is None else f"{times(gain)} torch with workers"
        panel.text(WIDTH, top, words, fontsize=10.5, color=COLORS[OURS], va="center", ha="right")
        fastest = max(map(max, result.rates.values()))  # each group has its own scale
        for number, name in enumerate((NO_WORKERS, TORCH, OURS), start=1):
            lane = top + number
            low, high = min(result.rates[name]) / fastest, max(result.rates[name]) / fastest
            panel.barh(lane, result.median(name) / fastest, 0.86, color=COLORS[name])
            panel.plot([low, high], [lane, lane], color=INK, linewidth=1.2, solid_capstyle="butt")
            panel.text(high + 0.015, lane, rate(result.median(name)), fontsize=10, color=INK, va="center")
    panel.set_xlim(0, WIDTH)
    panel.set_ylim(GROUP * len(results) - 0.6, -0.7)
    panel.set_axis_off()


def _draw_timeline(panel: Axes, timeline: Timeline) -> None:
    for lane, spans in enumerate(timeline.values()):
        for kind, (color, _) in SPANS.items():
            bars = [(start, end - start) for name, start, end in spans if name == kind]
            panel.broken_barh(bars, (lane - 0.4, 0.8), facecolors=color)
    panel.set_yticks(range(len(timeline)), list(timeline))
    panel.set_ylim(len(timeline) - 0.4, -0.6)
    panel.set_xlabel("ms", color=INK)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=INK, labelsize=9)
