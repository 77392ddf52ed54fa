"""Measures how long it takes to decode JPEG files of three sizes to 224 x 224 pixels, with Pillow and faster methods.

Each side starts with the bytes of a file and ends with a uint8 array of 224 x 224 x 3. The files are synthetic: coarse
noise, which is smooth like photographs, plus a little fine noise, at quality 90. A side whose library is not installed
is left out. The factors are medians of the rounds' ratios to "Pillow", which decodes the whole image and resizes it.

examples:
  python benches/decoding.py                    all sizes
  python benches/decoding.py --rows 500x375 --rounds 1 --files 2
  python benches/decoding.py --docs             write the table into docs/caching.md
"""

import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness.program import Program, main
from PIL import Image

from rustloader.tools.harness.layout import times
from rustloader.tools.harness.rounds import Failure, spread

SIDE = 224
SIZES = {"500x375": (500, 375), "1000x750": (1000, 750), "2000x1500": (2000, 1500)}
DOCS = Path(__file__).parent.parent / "docs" / "caching.md", "<!-- decoding -->"

Decode = Callable[[bytes], Any]

program = Program(__doc__, list(SIZES), rounds=7, docs=DOCS)
program.option("--files", type=int, default=16, help="number of files of each size (default: %(default)s)")


def pillow(file: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(file)) as image:
        return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def draft(file: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(file)) as image:
        image.draft("RGB", (SIDE, SIDE))
        return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def with_simplejpeg() -> Decode:
    import simplejpeg

    def decode(file: bytes) -> np.ndarray:
        image = simplejpeg.decode_jpeg(file, min_height=SIDE, min_width=SIDE)
        return np.asarray(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BILINEAR))

    return decode


def with_torchvision() -> Decode:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2.functional import resize

    def decode(file: bytes) -> np.ndarray:
        image = decode_jpeg(torch.frombuffer(bytearray(file), dtype=torch.uint8), mode=ImageReadMode.RGB)
        return resize(image, [SIDE, SIDE], antialias=True).permute(1, 2, 0).numpy()

    return decode


def with_kornia() -> Decode:
    import kornia_rs

    decode_whole = kornia_rs.io.ImageDecoder().decode

    def decode(file: bytes) -> np.ndarray:
        return np.asarray(kornia_rs.imgproc.resize(decode_whole(file), (SIDE, SIDE), "bilinear"))

    return decode


OTHERS = {"simplejpeg, scaled": with_simplejpeg, "torchvision.io": with_torchvision, "kornia-rs": with_kornia}


def sides() -> dict[str, Decode]:
    """Returns the sides whose libraries are installed, by name."""
    decoders: dict[str, Decode] = {"Pillow": pillow, "Pillow, draft": draft}
    for name, make in OTHERS.items():
        try:
            decoders[name] = make()
        except (ImportError, AttributeError, RuntimeError) as error:
            print(f"left out: {name}: {error}")
    return decoders


def files(size: tuple[int, int], count: int) -> list[bytes]:
    """Returns JPEG files whose images have the given width and height."""
    random, made = np.random.default_rng(0), []
    for _ in range(count):
        coarse = Image.fromarray(random.integers(256, size=(16, 20, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = (smooth + random.integers(-8, 9, size=smooth.shape)).clip(0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(noisy).save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return made


def seconds(decode: Decode, images: list[bytes]) -> float:
    """Returns the seconds per image."""
    begin = time.perf_counter()
    for image in images:
        decode(image)
    return (time.perf_counter() - begin) / len(images)


def check(name: str, image: Any, expected: np.ndarray) -> None:
    """Raises Failure unless a side produced about the same image as Pillow."""
    if image.shape != expected.shape or image.dtype != np.uint8:
        raise Failure(f"{name} made {image.dtype} {image.shape}")
    if (apart := np.abs(image.astype(int) - expected).mean()) > 8:
        raise Failure(f"{name} made a different image: the mean difference is {apart:.1f} levels")


def measure(row: str) -> None:
    """Checks and measures all sides with images of one size, and prints a line of the table."""
    images = files(SIZES[row], program.options.files)
    for name, decode in DECODERS.items():
        check(name, decode(images[0]), pillow(images[0]))
    rounds = program.interleave({name: partial(seconds, decode, images) for name, decode in DECODERS.items()}, row)
    ratios = {name: rounds.ratios("Pillow", name) for name in DECODERS if name != "Pillow"}
    cells = [spread(factors, times) for factors in ratios.values()]
    program.line(row, row.replace("x", " x "), f"{rounds.median('Pillow') * 1e3:.1f} ms", *cells, rounds=rounds)


if __name__ == "__main__":
    program.parse()
    DECODERS = sides()
    main(program, measure, "image", *DECODERS)
