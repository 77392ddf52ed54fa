"""Draws a profile of to_device.py or gpu.py: the copies and kernels of the device, by stream.

`to_device.py --rows images_f32 --trace out` writes the profile, `overlap.py out.images_f32.json docs/overlap.svg` draws
the last --ms milliseconds of it. Each stream has a row. A copy and a kernel that overlap are drawn one above the other.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from drawing import Drawing

COLORS = {"copy to the device": "#e0862f", "other copies": "#c9b79c", "kernel": "#1f5fa8"}


class Piece(NamedTuple):
    """A copy or kernel on the device. Times are in milliseconds."""

    stream: int
    kind: str
    begin: float
    end: float


def pieces(trace: dict[str, Any]) -> list[Piece]:
    """Returns the copies and kernels in a Chrome trace that torch.profiler wrote, by start time."""
    device_work = []
    for event in trace.get("traceEvents", []):
        category = event.get("cat")
        if event.get("ph") != "X" or category not in ("gpu_memcpy", "gpu_memset", "kernel"):
            continue
        is_to_device = "HtoD" in event["name"]
        kind = "kernel" if category == "kernel" else "copy to the device" if is_to_device else "other copies"
        begin, stream = event["ts"] / 1e3, int(event.get("args", {}).get("stream", event.get("tid", 0)))
        device_work.append(Piece(stream, kind, begin, begin + event["dur"] / 1e3))
    return sorted(device_work, key=lambda it: it.begin)


def merged(work: list[Piece]) -> list[tuple[float, float]]:
    """Returns the intervals in which at least one piece runs."""
    intervals: list[tuple[float, float]] = []
    for piece in sorted(work, key=lambda it: it.begin):
        if intervals and piece.begin <= intervals[-1][1]:
            intervals[-1] = intervals[-1][0], max(intervals[-1][1], piece.end)
        else:
            intervals.append((piece.begin, piece.end))
    return intervals


def overlap(work: list[Piece]) -> float:
    """Returns the share of the time spent on copies to the device during which a kernel also ran."""
    copies = merged([it for it in work if it.kind == "copy to the device"])
    kernels = merged([it for it in work if it.kind == "kernel"])
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in copies for c, d in kernels)
    total = sum(end - begin for begin, end in copies)
    return both / total if total else 0.0


def picture(work: list[Piece], milliseconds: float) -> str:
    """Draws the last ``milliseconds`` as SVG, with a row for each stream."""
    end = max(it.end for it in work)
    begin = max(min(it.begin for it in work), end - milliseconds)
    shown = [it for it in work if it.end > begin]
    streams = sorted({it.stream for it in shown})
    left, width, step, top = 90, 560, 34, 70
    bottom, scale = top + step * len(streams), width / (end - begin)
    drawn = Drawing()
    title = f"{end - begin:.1f} ms: {overlap(shown):.0%} of the copies to the device overlap with kernels"
    drawn.text(16, 22, title, 'font-weight="bold"')
    drawn.legend(COLORS, 180)
    for k, stream in enumerate(streams):
        drawn.text(16, top + step * k + 18, f"stream {stream}")
    for piece in shown:
        at = max(piece.begin, begin)
        y, wide = top + step * streams.index(piece.stream), max((piece.end - at) * scale, 0.5)
        drawn.rect(left + (at - begin) * scale, y, wide, 24, COLORS[piece.kind])
    drawn.text(left, bottom + 20, "0 ms")
    drawn.text(left + width, bottom + 20, f"{end - begin:.1f} ms", 'text-anchor="end"')
    return drawn.svg(left + width + 20, bottom + 30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="the profile, as --trace writes it")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("--ms", type=float, default=150.0, help="milliseconds to show (default: %(default)s)")
    options = parser.parse_args()
    work = pieces(json.loads(options.trace.read_text()))
    if not work:
        print(f"{options.trace} has no copies and no kernels: it was not recorded on a CUDA device", file=sys.stderr)
        return 2
    options.picture.write_text(picture(work, options.ms))
    print(f"A kernel also ran during {overlap(work):.0%} of the time spent on copies to the device: {options.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
