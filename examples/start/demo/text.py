"""The demo's output in the terminal, and README's table."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from demo.measure import NO_WORKERS, OURS, TORCH, Result
from demo.settings import Settings
from rustloader.system.formatting import count_of

__all__ = ["conclusion", "rate", "reason", "row", "table", "times"]

BAR = 24  # length of the longest bar, in characters
# If dataset code takes at least this share of the workers' time, it explains a small gain.
MOSTLY = 0.8


def times(ratio: float) -> str:
    """Returns a ratio with two digits: "0.85x", "1.1x", "14x"."""
    digits = 2 if ratio < 0.995 else 1 if ratio < 9.95 else 0
    return f"{ratio:.{digits}f}x"


def row(result: Result, workers: int) -> list[str]:
    """Returns the lines of a workload: the gain, and a bar for each loader."""
    labels = {
        NO_WORKERS: "torch, no workers",
        TORCH: f"torch, {count_of(workers, 'worker')}",
        OURS: f"rustloader, {count_of(workers, 'worker')}",
    }
    lines = [f"{result.workload.name} ({result.workload.detail}): {_gain(result)}"]
    fastest = max(map(result.median, labels))
    for name, label in labels.items():
        low, high = min(result.rates[name]), max(result.rates[name])
        bar = "█" * max(1, round(BAR * result.median(name) / fastest))
        spread = f"({rate(low)} to {rate(high)})"
        lines.append(f"  {label:<22}{rate(result.median(name)):>7}  {spread:<20}{bar}")
    if result.own_share >= MOSTLY:
        lines.append(f"  {reason(result)}")
    return lines


def reason(result: Result) -> str:
    """Returns a sentence that explains why no loader can make this workload much faster."""
    share = f"{100 * result.own_share:.0f} %"
    return f"{share} of the workers' time is spent {result.workload.work}, which no loader speeds up."


def conclusion(results: list[Result]) -> list[str]:
    """Returns the last lines of the output.

    They name the largest gain, the workloads without a gain, and those that are fastest without workers, and say how to
    measure a loader.
    """
    lines = []
    gains = [(gain, result) for result in results if (gain := result.ratio(OURS, TORCH)) is not None]
    drop_in = [(gain, result) for gain, result in gains if result.workload.ours is None]
    if drop_in:
        gain, best = max(drop_in, key=lambda pair: pair[0])
        lines.append(f"Largest gain: {best.workload.name}, {times(gain)} torch with workers.")
    for gain, result in gains:
        if result.workload.ours is not None:
            lines.append(f"With rustloader.cache: {result.workload.name}, {times(gain)} torch with workers.")
    lines += _without_gain([result for result in results if result.workload.ours is None])
    unneeded = [result.workload.name for result in results if _is_fastest(result, NO_WORKERS)]
    if unneeded:
        lines.append(f"Fastest without workers (num_workers=0): {', '.join(unneeded)}.")
    return [
        *lines,
        "Training gets faster only if it waits for its loader. To measure yours (make_loader returns it):",
        f"  {_python()} -m rustloader bench train.py:make_loader",
    ]


def table(results: list[Result], settings: Settings, machine: dict[str, Any]) -> str:
    """Returns the table for README.md, followed by a caption that says how it was measured.

    The table has the gains of a drop-in. A line below it has those of a cache, which torch's loader lacks.
    """
    workers = count_of(settings.workers, "worker")
    lines = [
        f"| batches per second | torch, no workers | torch, {workers} | rustloader, {workers} "
        "| gain over torch's workers | over the faster torch |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for result in (result for result in results if result.workload.ours is None):
        cells = [f"{result.workload.name} ({result.workload.detail})"]
        cells += [_cell(result, name) for name in (NO_WORKERS, TORCH, OURS)]
        best_torch = max((NO_WORKERS, TORCH), key=result.median)
        cells += [_gain_cell(result.ratio(OURS, other)) for other in (TORCH, best_torch)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", _caption(settings, machine)]
    for result in (result for result in results if result.workload.ours is not None):
        lines += ["", _cached(result)]
    return "\n".join(lines)


def _cached(result: Result) -> str:
    """Describes what a cache gains. Both loaders make the same batches, but torch's makes each sample in each epoch."""
    ours, torch, no_workers = (rate(result.median(name)) for name in (OURS, TORCH, NO_WORKERS))
    return (
        f"Not a drop-in, but one more line of code: [`rustloader.cache`](docs/caching.md) keeps decoded samples. "
        f"{result.workload.name} ({result.workload.detail}): **{ours}** batches per second; torch, which decodes the "
        f"files in each epoch: {torch} with workers, {no_workers} without."
    )


def _caption(settings: Settings, machine: dict[str, Any]) -> str:
    return (
        f"Medians of {settings.rounds} interleaved rounds of {settings.seconds:g} s, with {step(settings)}; "
        "workers persist. Bold: the fastest. Measured by `make demo` on {cores} cores of {cpu}, Linux {kernel}, Python "
        "{python}, torch {torch}, rustloader {rustloader}.".format(**machine)
    )


def step(settings: Settings) -> str:
    """Describes the training step of part 1."""
    if not settings.step:
        return "no training step"
    return f"a training step of {settings.step * 1e3:g} ms (the loop sleeps, as it would while waiting for a GPU)"


def _gain(result: Result) -> str:
    """Describes the gain over torch with workers, and over torch without workers."""
    gain, without = result.ratio(OURS, TORCH), result.ratio(OURS, NO_WORKERS)
    if gain is None:
        words = "no measurable difference from torch with workers"
    else:
        words = f"{times(gain)} torch with workers" + (" (slower)" if gain < 1 else "")
    if without is None:
        return f"{words}; without: no measurable difference" if gain is not None else f"{words} or without"
    if without < 1:
        return f"{words}; torch without workers is faster ({times(1 / without)} rustloader)"
    return f"{words}, {times(without)} without"


def _without_gain(results: list[Result]) -> list[str]:
    """Returns lines that name the workloads without a gain, with reasons, or else the one with the smallest gain."""
    same = [result for result in results if result.ratio(OURS, TORCH) is None]
    lines, noisy = [], [result.workload.name for result in same if result.own_share < MOSTLY]
    for result in same:
        if result.own_share >= MOSTLY:
            lines += [f"No measurable difference: {result.workload.name}.", f"  {reason(result)}"]
    if noisy:
        lines.append(f"No measurable difference: {', '.join(noisy)} (the ranges of the rounds overlap).")
    if not same and len(results) > 1:
        least = min(results, key=lambda result: result.median(OURS) / result.median(TORCH))
        lines.append(f"Smallest gain: {least.workload.name}, {times(least.median(OURS) / least.median(TORCH))}.")
        lines += [f"  {reason(least)}"] if least.own_share >= MOSTLY else []
    return lines


def rate(value: float) -> str:
    """Returns a rate in batches/s with three digits or more: "44.9", "15,926"."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def _is_fastest(result: Result, name: str) -> bool:
    """Returns True if a loader is measurably faster than both others."""
    ratios = [result.ratio(name, other) for other in result.rates if other != name]
    return all(ratio is not None and ratio > 1 for ratio in ratios)


def _cell(result: Result, name: str) -> str:
    text = rate(result.median(name))
    return f"**{text}**" if _is_fastest(result, name) else text


def _gain_cell(ratio: float | None) -> str:
    return "no measurable difference" if ratio is None else times(ratio)


def _python() -> str:
    """Returns the interpreter's path for a command line, relative to the current folder if it is inside."""
    python = Path(sys.executable)
    here = Path.cwd()
    return shlex.quote(str(python.relative_to(here) if python.is_relative_to(here) else python))
