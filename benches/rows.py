"""The rows of the comparison with torch: what a batch contains, and how many batches an epoch has."""

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.data

import rustloader

IMAGE = (3, 224, 224)
MIB = 1 << 20


class Samples(torch.utils.data.Dataset):
    """A dataset of `length` samples, which cycles through a few samples created beforehand.

    Each access passes the sample to `fresh`, if given, and then the result to `then`, if given.
    """

    def __init__(
        self,
        samples: list[Any],
        length: int,
        fresh: Callable[[Any], Any] | None = None,
        then: Callable[[Any], Any] | None = None,
    ):
        self.samples = samples
        self.length = length
        self.fresh = fresh
        self.then = then

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[index % len(self.samples)]
        sample = sample if self.fresh is None else self.fresh(sample)
        return sample if self.then is None else self.then(sample)

    def cached(self) -> Any:
        """Returns the dataset in a cache, which keeps each sample after `fresh` and before `then`."""
        return rustloader.cache(Samples(self.samples, self.length, self.fresh), then=self.then)


class Naps(torch.utils.data.Dataset):
    """A dataset whose sample i is i, after a sleep of `seconds[i]`."""

    def __init__(self, seconds: Sequence[float]):
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds[index])
        return index


def identity(batch: Any) -> Any:
    return batch


def clone_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def one(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array[0])


def scalars() -> list[Any]:
    return [torch.tensor(float(i)) for i in range(256)]


def tokens() -> list[Any]:
    names = ("input_ids", "attention_mask", "labels")
    return [{name: torch.randint(50_000, (512,)) for name in names} for _ in range(128)]


def images_u8() -> list[Any]:
    return [(torch.randint(256, IMAGE, dtype=torch.uint8), i % 10) for i in range(64)]


def images_f32() -> list[Any]:
    return [(torch.rand(IMAGE), i % 10) for i in range(64)]


def images_numpy() -> list[Any]:
    random = np.random.default_rng(0)
    return [(random.integers(256, size=IMAGE, dtype=np.uint8), i % 10) for i in range(64)]


def large_tensors() -> list[Any]:
    return [torch.rand(64, *IMAGE) for _ in range(2)]


def large_arrays() -> list[Any]:
    return [np.random.default_rng(i).random(2 * MIB) for i in range(2)]


def hundred_mb() -> list[Any]:
    """Returns samples that take a long time to send to a spawned worker."""
    return list(np.random.default_rng(0).random((100, MIB // 8)))


def jpegs() -> list[Any]:
    """Returns JPEG files of 500 x 375 pixels: smooth, coarse noise plus a little fine noise."""
    from PIL import Image

    random = np.random.default_rng(0)
    files = []
    for _ in range(32):
        coarse = Image.fromarray(random.integers(256, size=(16, 20, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = (smooth + random.integers(-8, 9, size=smooth.shape)).clip(0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(noisy).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def decode(file: bytes, side: int = IMAGE[1]) -> torch.Tensor:
    """Decodes a JPEG file to a square image of ``side`` pixels. Returns a uint8 tensor."""
    from PIL import Image

    with Image.open(io.BytesIO(file)) as image:
        small = image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(small)).permute(2, 0, 1)


def decode_larger(file: bytes) -> torch.Tensor:
    """Decodes a JPEG file to a larger image, for a cache to keep and ``crop_and_flip`` to crop."""
    return decode(file, 256)


def crop_and_flip(image: torch.Tensor) -> torch.Tensor:
    """Crops and flips an image as augmentation does, without random numbers."""
    return image[:, 16 : 16 + IMAGE[1], 16 : 16 + IMAGE[2]].flip(2)


@dataclass(frozen=True)
class Row:
    """A row of the comparison: how its batches are made, and the settings of its loaders."""

    name: str
    what: str
    batches: int  # per epoch
    batch_size: int | None
    samples: Callable[[], list[Any]]
    fresh: Callable[[Any], Any] | None = None
    collate: Callable[[Any], Any] | None = None
    # The step after `fresh`; rustloader's loader has a cache in between, which a first epoch fills.
    then: Callable[[Any], Any] | None = None
    # Settings of the loaders.
    workers: int = 2
    start_method: str = "fork"
    # Number of epochs in a round: more than one if a single epoch is too short to time.
    epochs: int = 1
    # Whether to measure the time to the first batch, not to the end of the epoch. Workers must not be persistent.
    to_first: bool = False

    def count(self, quick: bool = False) -> int:
        """Returns the number of batches in an epoch."""
        return max(8, self.batches // 10) if quick else self.batches

    def dataset(self, quick: bool = False) -> Samples:
        """Creates the dataset of the row."""
        torch.manual_seed(0)
        return Samples(self.samples(), self.count(quick) * (self.batch_size or 1), self.fresh, self.then)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments for a loader with workers."""
        return {
            "batch_size": self.batch_size,
            "collate_fn": self.collate,
            "num_workers": self.workers,
            "multiprocessing_context": self.start_method,
        }


SPAWN = "to the first batch, a dataset of 100 MB, 4 workers, spawn"
FORKSERVER = "the same, forkserver with torch preloaded"
READY, FRESH = "one ready 16 MB NumPy array, collate = identity", "a fresh 16 MB NumPy array, collate = identity"
ROWS = [
    Row("scalar", "one 0-d float tensor, batch 1", 8000, 1, scalars),
    Row("floats8", "8 floats, batch 64", 1500, 64, lambda: list(torch.rand(256, 8).unbind())),
    Row("tokens", "dict of 3 int64 fields of 512, batch 32", 1000, 32, tokens),
    Row(
        "fields64",
        "dict of 64 Python floats, batch 32",
        200,
        32,
        lambda: [{f"field_{k:02d}": float(i * 64 + k) for k in range(64)} for i in range(128)],
    ),
    Row(
        "leaves50",
        "50 tensors of 16 KiB, batch_size=None",
        300,
        None,
        lambda: [[torch.rand(4096) for _ in range(50)] for _ in range(4)],
        clone_all,
    ),
    Row("images_u8", "u8 images and labels, batch 64, 9.6 MB", 400, 64, images_u8),
    Row("images_f32", "f32 images and labels, batch 64, 38.5 MB", 150, 64, images_f32),
    Row("images_f32_256", "f32 images and labels, batch 256, 154 MB", 40, 256, images_f32),
    Row("images_numpy", "NumPy u8 images and labels, batch 64", 400, 64, images_numpy),
    Row("ready_tensor", "one 38.5 MB tensor, cloned each time", 100, None, large_tensors, torch.clone),
    Row("ready_numpy", READY, 150, None, large_arrays, collate=identity),
    Row("fresh_numpy", FRESH, 150, None, large_arrays, np.copy, identity),
    Row(
        "texts",
        "list of bytes and str, batch 64",
        500,
        64,
        lambda: [bytes([i]) * 100 if i % 2 else f"sample number {i}" for i in range(128)],
    ),
    Row("same_tensor", "the same 38.5 MB tensor again and again", 100, None, large_tensors),
    Row("jpeg", "JPEG decoded and resized, batch 32, 4.8 MB", 30, 32, jpegs, decode),
    Row(
        "jpeg_cached",
        "JPEG in a cache, second epoch: cropped and flipped, batch 32, 4.8 MB",
        30,
        32,
        jpegs,
        decode_larger,
        then=crop_and_flip,
    ),
    Row("epoch_start", "8 batches of one scalar, 4 workers", 8, 1, scalars, workers=4, epochs=10),
    Row("start_spawn", SPAWN, 8, 1, hundred_mb, one, workers=4, start_method="spawn", to_first=True),
    Row("start_forkserver", FORKSERVER, 8, 1, hundred_mb, one, workers=4, start_method="forkserver", to_first=True),
]
BY_NAME = {row.name: row for row in ROWS}
