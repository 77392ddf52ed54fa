"""Detects JPEG files that are decoded far larger than the samples need.

It is only done in the warm-up of ``bench``: workers note the sizes of the first images that Pillow decodes, and the
main process the shape of a batch. A program's own loaders are left as they are.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from rustloader.system.patches import Patch

_PLACE = "PIL.JpegImagePlugin.JpegImageFile.load"
# Images that a worker notes.
_IMAGES_NOTED = 16
# Pillow is asked for this multiple of the side that a sample keeps: random crops need more than they keep.
_MARGIN = 2
# Rounds of a measurement, and the least gain that is worth a word.
_ROUNDS, _MIN_GAIN = 3, 1.5

# Width and height.
Size = tuple[int, int]


class Noted:
    """Replaces a loader's ``worker_init_fn``: a worker writes the sizes of the first images that it decodes to a file.
    Where Pillow is not imported by then, nothing is noted.

    Attributes:
        sizes: what workers have noted, from ``read``.
    """

    def __init__(self, path: str, init_fn: Callable[[int], object] | None) -> None:
        self._path, self._init_fn = path, init_fn
        self.sizes: list[Size] = []

    def __call__(self, worker: int) -> None:
        if self._init_fn is not None:
            self._init_fn(worker)
        if "PIL.Image" in sys.modules:
            from PIL import JpegImagePlugin  # which Pillow imports with the first image

            note_sizes(JpegImagePlugin.JpegImageFile, self._write)

    def _write(self, size: Size) -> None:
        # Persistent workers decode images after the first pass, too, when the file's folder is gone.
        with contextlib.suppress(OSError), open(self._path, "a") as file:
            file.write("{} {}\n".format(*size))

    def read(self) -> None:
        """Reads the sizes that the workers have noted so far into ``sizes``."""
        with contextlib.suppress(FileNotFoundError), open(self._path) as file:
            self.sizes = [(int(width), int(height)) for width, height in (line.split() for line in file)]


def note_sizes(kind: Any, note: Callable[[Size], object]) -> None:
    """Calls ``note`` with the size of each of the first images of Pillow's class ``kind`` that are decoded."""
    patch, decode, left = Patch(_PLACE, kind), kind.load, _IMAGES_NOTED

    def load(image: Any) -> Any:
        nonlocal left
        # The image has tiles until it is decoded, which later calls find done.
        if image.tile:
            left -= 1
            if left <= 0:
                patch.take_out()
            note(image.size)
        return decode(image)

    patch.put_in(load)


def kept_size(batch: Any) -> Size | None:
    """Returns the width and height of the images in a batch: of the largest tensor or array of the form N x C x H x W
    or N x H x W x C; None without one.
    """
    from rustloader.tools.probe.leaves import leaves

    largest: Size | None = None
    for leaf in leaves(batch):
        shape = tuple(getattr(leaf.value, "shape", ()))
        if len(shape) == 4 and shape[1] in (1, 3, 4):
            one = (shape[3], shape[2])
        elif len(shape) == 4 and shape[3] in (1, 3, 4):
            one = (shape[2], shape[1])
        else:
            continue
        if largest is None or one[0] * one[1] > largest[0] * largest[1]:
            largest = one
    return largest


def advice(decoded: list[Size], kept: Size | None, measure: Callable[[Size, Size], float] | None = None) -> str:
    """Returns a sentence on images that are decoded far larger than the samples need; empty if they are not.

    Args:
        decoded: sizes of decoded images.
        kept: the size that samples keep.
        measure: the gain of a scaled decode, from the sizes of an image and of the requested one.
    """
    if not decoded or kept is None:
        return ""
    width, height = (round(statistics.median(side)) for side in zip(*decoded, strict=True))
    wanted = (_MARGIN * kept[0], _MARGIN * kept[1])
    # Pillow scales by 1/2, 1/4 or 1/8, and not below the requested size.
    if min(width / wanted[0], height / wanted[1]) < 2:
        return ""
    gain = (measure or draft_gain)((width, height), wanted)
    if gain < _MIN_GAIN:
        return ""
    return (
        f"Images of {width} x {height} are decoded and leave as {kept[0]} x {kept[1]}: Pillow's `draft` or a scaled "
        f"decode would be about {gain:.0f}x as fast."
    )


def draft_gain(size: Size, wanted: Size) -> float:
    """Measures on this machine how many times as fast Pillow decodes an image of a size if it may scale it down."""
    from PIL import Image

    file = io.BytesIO()
    # Smooth, with a little noise, like a photograph.
    coarse = (max(1, size[0] // 16), max(1, size[1] // 16))
    noise = Image.effect_noise(coarse, 64).resize(size, Image.Resampling.BICUBIC)
    Image.merge("RGB", [noise] * 3).save(file, "JPEG", quality=90)

    def seconds(draft: bool) -> float:
        taken = []
        for _ in range(_ROUNDS):
            begin = time.perf_counter()
            with Image.open(io.BytesIO(file.getvalue())) as image:
                if draft:
                    image.draft("RGB", wanted)
                image.load()
            taken.append(time.perf_counter() - begin)
        return min(taken)

    return seconds(draft=False) / seconds(draft=True)
