"""Draws the plot of ``bench``: timelines, and the rates of a sweep. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rustloader.system.formatting import count_of
from rustloader.tools.bench.rates import SideRates
from rustloader.tools.bench.recommendation import Choice
from rustloader.tools.bench.results import Point, merge_by_workers
from rustloader.tools.bench.settings import Setting
from rustloader.tools.bench.timeline import Timeline
from rustloader.tools.harness.layout import listed

# Colors from the palette of Okabe and Ito, which color-blind readers can distinguish.
_COLORS = {"fetch": "#56B4E9", "collate": "#0072B2", "send": "#009E73", "wait": "#E69F00", "step": "#BBBBBB"}
_WORDS = {
    "fetch": "worker: fetch",
    "collate": "worker: collate",
    "send": "worker: send",
    "wait": "main: in next()",
    "step": "main: training step",
}
_ENGINE_COLORS = {"torch": "#D55E00", "rustloader": "#0072B2"}
# Colors of the curves of a sweep: torch, then rustloader with each combination of options.
_CURVE_COLORS = [*_ENGINE_COLORS.values(), "#009E73", "#E69F00", "#56B4E9", "#CC79A7"]
# Maximum number of workers that get a lane in a timeline.
_MAX_LANES = 16
# Bars of up to this share of a timeline are drawn without edges.
_MAX_THIN_SHARE = 0.01
_CAPTION = (
    "One run of each engine, recorded separately from the measurement. Blank: idle. "
    "Sending by torch's workers is not shown, because a thread does it; rustloader's is drawn with its mean duration."
)
_INK = "#333333"


def draw(
    title: str, points: list[Point], choices: dict[str, Choice], timelines: dict[str, Timeline], step: float
) -> Figure:
    """Draws a timeline for each engine, if there are workers, and the rates of a sweep.

    ``choices`` and ``timelines`` are keyed by engine. ``step`` is the duration of the training step in seconds.
    """
    swept = bool(choices)
    lanes = 1 + min(_MAX_LANES, next((timeline.workers for timeline in timelines.values()), 0))
    heights = [0.5 + 0.32 * lanes] * len(timelines) + [3.4] * swept
    figure = Figure(figsize=(10, sum(heights) + 0.75 * len(heights) + 0.6), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=13, color=_INK)
    panels = list(figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0])
    if timelines:
        draw_timelines(panels[: len(timelines)], timelines, step)
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": len(_COLORS)}  # next to the title
        style = {"handlelength": 1, "columnspacing": 1.2, "borderaxespad": 0.2, "frameon": False, "fontsize": 8}
        panels[0].legend(handles=timeline_legend(timelines, step), **place, **style)
        figure.supxlabel(_CAPTION, fontsize=8, color=_INK)
    if swept:
        _draw_rates(panels[-1], points, choices)
    return figure


def timeline_legend(timelines: dict[str, Timeline], step: float) -> list[Patch]:
    """Returns the legend's entries for these timelines."""
    seen = {what for timeline in timelines.values() for spans in timeline.spans.values() for what, *_ in spans}
    shown = [kind for kind in _COLORS if kind in seen or kind == "wait" or (kind == "step" and step)]
    return [Patch(color=_COLORS[kind], label=_WORDS[kind]) for kind in shown]


def draw_timelines(panels: Sequence[Axes], timelines: dict[str, Timeline], step: float) -> None:
    """Draws the timeline of each engine on its panel. All panels show the same batches at the same scale."""
    # The batches that both engines delivered, without those skipped at the start.
    count = min(len(timeline.returned) for timeline in timelines.values())
    first = min(*(timeline.skipped for timeline in timelines.values()), count // 2)
    windows = {name: timeline.window(first, count) for name, timeline in timelines.items()}
    longest = max(end - begin for begin, end in windows.values())
    for panel, (name, timeline) in zip(panels, timelines.items(), strict=True):
        begin, end = windows[name]
        draw_timeline(panel, timeline, begin, end, step)
        panel.set_xlim(0, longest * 1e3)
        panel.axvspan((end - begin) * 1e3, longest * 1e3, color="#F4F4F4", lw=0)
        text = (
            f"{name}, {count_of(timeline.workers, 'worker')}: {count - first} batches in {(end - begin) * 1e3:,.0f} ms"
        )
        panel.set_title(text, loc="left", fontsize=11, color=_ENGINE_COLORS[name])
    panels[-1].set_xlabel("ms", color=_INK)


def draw_timeline(panel: Axes, timeline: Timeline, begin: float, end: float, step: float) -> None:
    """Draws one engine's timeline from ``begin`` to ``end``, with a lane for the main process and for each worker.

    The x axis is in milliseconds since ``begin``. A ``step`` of 0 seconds is not drawn.
    """

    def bars(lane: int, spans: list[tuple[float, float]], kind: str) -> None:
        visible = [(max(a, begin), min(b, end)) for a, b in spans if b > begin and a < end]
        ranges = [((a - begin) * 1e3, (b - a) * 1e3) for a, b in visible]
        # White edges separate bars. The shortest bars have none, because edges would hide them.
        edges = [0.3 if b - a > _MAX_THIN_SHARE * (end - begin) else 0.0 for a, b in visible]
        panel.broken_barh(ranges, (lane - 0.4, 0.8), facecolors=_COLORS[kind], edgecolors="white", linewidths=edges)

    called, returned = timeline.called, timeline.returned
    bars(0, list(zip(called, returned, strict=False)), "wait")
    if step:
        bars(0, list(zip(returned, called[1:], strict=False)), "step")
    shown = range(min(timeline.workers, _MAX_LANES))
    for worker in shown:
        for kind in ("fetch", "collate", "send"):
            spans = [(a, b) for what, a, b in timeline.spans.get(worker, ()) if what == kind]
            bars(worker + 1, spans, kind)
    more = "" if timeline.workers <= _MAX_LANES else f" of {timeline.workers}"
    panel.set_yticks([0, *(worker + 1 for worker in shown)], ["main", *(f"worker {worker}{more}" for worker in shown)])
    panel.set_ylim(len(shown) + 0.6, -0.6)
    _hide_frame(panel)
    panel.tick_params(axis="y", length=0)


def _draw_rates(panel: Axes, points: list[Point], choices: dict[str, Choice]) -> None:
    legend = "small dots: epochs"
    for (label, sides), color in zip(_rate_curves(points), _CURVE_COLORS * len(points), strict=False):
        panel.plot(list(sides), [side.rate for side in sides.values()], color=color, label=label, linewidth=1.8)
        for count, side in sides.items():
            panel.plot([count] * len(side.rates), side.rates, "o", color=color, alpha=0.35, markersize=3)
            panel.plot(count, side.rate, "o", color=color, markerfacecolor="white" if side.too_few else color)
            if side.too_few:
                legend = "small dots: epochs; hollow: too few to tell"
    panel.set_xticks(sorted({point.workers for point in points}))
    panel.set_xlabel("num_workers", color=_INK)
    panel.set_ylabel("batches/s", color=_INK)
    panel.set_ylim(bottom=0)
    panel.set_title(f"{_recommended(choices)} ({legend})", loc="left", fontsize=11, color=_INK)
    panel.legend(frameon=False, fontsize=9)
    _hide_frame(panel)


def _rate_curves(points: list[Point]) -> list[tuple[str, dict[int, SideRates]]]:
    """Returns the rates by number of workers: of torch, and of rustloader with each combination of options."""
    curves = [("torch", {point.workers: point.torch for point in merge_by_workers(points)})]
    for options in dict.fromkeys(point.options for point in points if not (point.torch_only and len(points) > 1)):
        # The point without workers belongs to all curves, because the options have no effect on it.
        sides = {point.workers: point.rustloader for point in points if point.options == options or point.torch_only}
        curves.append((f"rustloader{f', {Setting(None, options)}' if options else ''}", sides))
    return curves


def _recommended(choices: dict[str, Choice]) -> str:
    chosen = {engine: choice for engine, choice in choices.items() if choice.workers is not None}
    if not chosen:
        reason = next((choice.reason for choice in choices.values() if choice.reason), "")
        return "No recommendation" + (f": {reason.partition(':')[0]}" if reason else "")
    if any(choice.options for choice in chosen.values()):
        return "; ".join(f"Recommended with {engine}: {choice.setting}" for engine, choice in chosen.items())
    return (
        f"Recommended num_workers: {listed([f'{choice.workers} with {engine}' for engine, choice in chosen.items()])}"
    )


def _hide_frame(panel: Axes) -> None:
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        panel.spines[side].set_color("#999999")
    panel.tick_params(colors=_INK, labelsize=9)
