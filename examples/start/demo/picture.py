"""The demo's picture: the gains as bars, next to a timeline of each loader at work. Needs matplotlib."""

from __future__ import annotations

import tempfile
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from demo.measure import NO_WORKERS, OURS, STEP, TORCH, Result
from demo.settings import Settings
from demo.text import rate, times
from demo.workloads import Workload
from rustloader.tools.bench.picture import draw_timelines, timeline_legend
from rustloader.tools.bench.timeline import Timeline

__all__ = ["draw", "write"]

INK = "#333333"
# Okabe and Ito's colors, which color-blind people can distinguish. The timelines use those of TORCH and OURS.
COLORS = {NO_WORKERS: "#777777", TORCH: "#D55E00", OURS: "#0072B2"}
GROUP = 4.4  # height of a workload's group, in bars: its title, three bars, a gap
WIDTH = 1.17  # width of the part with the bars; the longest bar is 1, and its rate is next to it


def write(results: list[Result], timelines: dict[str, Timeline], pictured: Workload, settings: Settings) -> None:
    """Draws the picture, and writes it to the file that the settings name."""
    figure = draw(results, timelines, pictured, settings.workers)
    # Text is written as outlines, because a reader's machine may lack the font. IDs are fixed and the date is left out,
    # so that equal pictures give equal files.
    with matplotlib.rc_context({"svg.hashsalt": "rustloader", "svg.fonttype": "path"}):
        with tempfile.TemporaryDirectory(dir=settings.plot.absolute().parent) as unfinished:
            new = Path(unfinished) / settings.plot.name
            figure.savefig(new, metadata={"Date": None} if new.suffix == ".svg" else None)
            new.replace(settings.plot)


def draw(results: list[Result], timelines: dict[str, Timeline], pictured: Workload, workers: int) -> Figure:
    """Draws and returns the figure.

    Args:
        results: the results; each gets a group of bars.
        timelines: the timelines of TORCH and OURS, by name.
        pictured: the workload of the timelines.
        workers: number of worker processes per loader.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)  # inches
    figure = Figure(figsize=(11, max(5.6, 1.3 * len(results))), dpi=160, layout=layout, facecolor="white")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.3), wspace=0.04)[0]

    left.suptitle("Batches per second (line: range of the rounds)", fontsize=12, color=INK)
    gains = left.subplots()
    _draw_gains(gains, results)
    labels = {NO_WORKERS: "torch, no workers", TORCH: "torch", OURS: "rustloader"}
    _draw_legend(left, [Patch(color=COLORS[name], label=label) for name, label in labels.items()])

    right.suptitle(f"{pictured.name}, with a training step of {STEP * 1e3:.0f} ms", fontsize=12, color=INK)
    panels = list(right.subplots(2, sharex=True))
    draw_timelines(panels, timelines, STEP)
    _draw_legend(right, timeline_legend(timelines, STEP))
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
