"""Detects JPEG images that are decoded at a far larger size than the samples need.

The check runs only in the warm-up of ``bench``: workers record the sizes of the first images that Pillow decodes, and
the main process reads the shape of a batch. Other loaders in the program are unaffected.
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

_PATCHED_METHOD = "PIL.JpegImagePlugin.JpegImageFile.load"
# Number of images that a worker records.
_MAX_IMAGES = 16
# The requested size of a scaled decode, as a multiple of the size in a sample: random crops need more pixels than they
# keep.
_MARGIN = 2
# Number of rounds of a measurement, and minimum gain for advice.
_ROUNDS, _MIN_GAIN = 3, 1.5

# Width and height.
Size = tuple[int, int]


class SizeRecorder:
    """A ``worker_init_fn`` that makes a worker write the sizes of the first images that it decodes to a file.

    Calls ``init_fn``, the loader's own ``worker_init_fn``, first. If Pillow has not been imported by then, records
    nothing.

    Attributes:
        sizes: the sizes from all workers; set by ``read``.
    """

    def __init__(self, path: str, init_fn: Callable[[int], object] | None) -> None:
        self._path, self._init_fn = path, init_fn
        self.sizes: list[Size] = []

    def __call__(self, worker: int) -> None:
        if self._init_fn is not None:
            self._init_fn(worker)
        if "PIL.Image" in sys.modules:
            from PIL import JpegImagePlugin  # Pillow imports this module with the first image

            note_sizes(JpegImagePlugin.JpegImageFile, self._write)

    def _write(self, size: Size) -> None:
        # Persistent workers may decode images after the first pass, when the file's folder no longer exists.
        with contextlib.suppress(OSError), open(self._path, "a") as file:
            file.write("{} {}\n".format(*size))

    def read(self) -> None:
        """Sets ``sizes`` to the sizes that the workers have recorded so far."""
        with contextlib.suppress(FileNotFoundError), open(self._path) as file:
            self.sizes = [(int(width), int(height)) for width, height in (line.split() for line in file)]


def note_sizes(kind: Any, note: Callable[[Size], object]) -> None:
    """Patches Pillow's class ``kind`` to call ``note`` with the size of each of the first images that it decodes."""
    patch, decode, left = Patch(_PATCHED_METHOD, kind), kind.load, _MAX_IMAGES

    def load(image: Any) -> Any:
        nonlocal left
        # The image has tiles until it is decoded. Later calls do not decode it again.
        if image.tile:
            left -= 1
            if left <= 0:
                patch.take_out()
            note(image.size)
        return decode(image)

    patch.put_in(load)


def kept_size(batch: Any) -> Size | None:
    """Returns the width and height of the images in a batch.

    Reads them from the largest tensor or array of shape N x C x H x W or N x H x W x C. Returns None if there is none.
    """
    from rustloader.tools.probe.leaves import leaves

    largest: Size | None = None
    for leaf in leaves(batch):
        shape = tuple(getattr(leaf.value, "shape", ()))
        if len(shape) == 4 and shape[1] in (1, 3, 4):
            image_size = (shape[3], shape[2])
        elif len(shape) == 4 and shape[3] in (1, 3, 4):
            image_size = (shape[2], shape[1])
        else:
            continue
        if largest is None or image_size[0] * image_size[1] > largest[0] * largest[1]:
            largest = image_size
    return largest


def advice(decoded: list[Size], kept: Size | None, measure: Callable[[Size, Size], float] | None = None) -> str:
    """Returns a sentence about images that are decoded at a far larger size than needed; empty if there are none.

    Args:
        decoded: sizes of decoded images.
        kept: size of the images in samples; None if unknown.
        measure: a function that returns the gain from a scaled decode, given the size of an image and the requested
            size (default: ``draft_gain``).
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
        f"Images of {width} x {height} are decoded and reduced to {kept[0]} x {kept[1]}: Pillow's `draft` or a scaled "
        f"decode would be about {gain:.0f}x as fast."
    )


def draft_gain(size: Size, wanted: Size) -> float:
    """Returns how many times as fast Pillow decodes an image of ``size`` if it may scale down to ``wanted``."""
    from PIL import Image

    file = io.BytesIO()
    # Enlarged coarse noise, which is smooth like photographs.
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
