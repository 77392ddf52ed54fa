"""The datasets of the demo, and the image files that three of them read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

import rustloader

__all__ = ["WORKLOADS", "Workload", "write_files"]

SIDE = 224  # width and height of an image in a batch, in pixels
RESIZED = 256  # the same before the image is cropped
# Number of samples in an epoch, most of them repeated, so that an epoch rarely ends during a measurement.
EPOCH = 1_000_000


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Windows of 1024 tokens from a text of 2 million tokens, as for training a language model."""

    def __init__(self) -> None:
        self.text = np.random.default_rng(0).integers(50_257, size=2_000_000, dtype=np.uint16)

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = torch.from_numpy(self.text[index : index + 1025].astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[1:], "attention_mask": torch.ones(1024, dtype=torch.int64)}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of a table in memory: 16 numbers, 8 categories and a target."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.numbers = torch.rand(100_000, 16, generator=generator)
        self.categories = torch.randint(1000, (100_000, 8), generator=generator)
        self.targets = torch.rand(100_000, generator=generator)

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = index % len(self.targets)
        return {"numbers": self.numbers[row], "categories": self.categories[row], "target": self.targets[row]}


class CachedImages(Dataset[tuple[torch.Tensor, int]]):
    """Decoded images of 3 x 224 x 224 bytes from a memory-mapped file, each with a label."""

    def __init__(self, data: Path) -> None:
        self.file = data / "images.npy"

    @cached_property
    def images(self) -> np.ndarray:
        images: np.ndarray = np.load(self.file, mmap_mode="c")  # copy-on-write, because torch requires writable memory
        return images

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.images[index % len(self.images)]), index % 10


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """Images from JPEG files, decoded, then cropped and flipped at random, as for training a net on photographs."""

    def __init__(self, data: Path) -> None:
        self.files = sorted((data / "photographs").glob("*.jpg"))

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files[index % len(self.files)]) as file:
            photograph = file.convert("RGB")
        scale, across, down, flip = torch.rand(4).tolist()
        side = (0.5 + 0.5 * scale) * min(photograph.size)
        left, top = across * (photograph.width - side), down * (photograph.height - side)
        box = (left, top, left + side, top + side)
        image = photograph.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
        if flip < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), index % 10


class Resized(Dataset[tuple[torch.Tensor, int]]):
    """Images from JPEG files, decoded and resized: the work whose results a cache keeps."""

    def __init__(self, data: Path) -> None:
        self.files = sorted((data / "photographs").glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files[index]) as file:
            image = file.convert("RGB").resize((RESIZED, RESIZED), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), index % 10


def crop_and_flip(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    """Crops and flips an image at random. Runs in each epoch, even on images from a cache."""
    image, label = sample
    across, down, flip = torch.rand(3).tolist()
    left, top = (int(share * (RESIZED - SIDE + 1)) for share in (across, down))
    image = image[:, top : top + SIDE, left : left + SIDE]
    return (image.flip(2) if flip < 0.5 else image), label


class Epochs(Dataset[tuple[torch.Tensor, int]]):
    """A dataset that repeats a small dataset to the length of ``EPOCH``; ``then`` transforms each sample."""

    def __init__(self, dataset: Dataset[Any], then: Callable[[Any], Any] | None = None) -> None:
        self.dataset: Any = dataset
        self.then = then

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample: tuple[torch.Tensor, int] = self.dataset[index % len(self.dataset)]
        return sample if self.then is None else self.then(sample)


def cached(data: Path) -> Dataset[Any]:
    """Returns a dataset with the samples of ``Epochs(Resized(data), crop_and_flip)``, whose images are in a cache."""
    samples = rustloader.cache(Resized(data), memory="64MiB", then=crop_and_flip)
    for index in range(len(samples)):  # the first epoch, which fills the cache
        samples[index]
    return Epochs(samples)


@dataclass(frozen=True)
class Workload:
    """One row of the demo.

    Attributes:
        name: what the batches contain, in a few words.
        detail: the shape of a batch.
        work: what the dataset does for a sample, as a phrase that follows "time is spent".
        dataset: creates the dataset, given the folder of the image files.
        batch_size: samples per batch.
        ours: creates a cache of equal samples for rustloader's loader; None for a drop-in, which uses the same dataset.
    """

    name: str
    detail: str
    work: str
    dataset: Callable[[Path], Dataset[Any]]
    batch_size: int
    ours: Callable[[Path], Dataset[Any]] | None = None


WORKLOADS = [
    Workload("Tabular rows", "256 dicts of 3 fields", "looking rows up", lambda _: Rows(), 256),
    Workload("LLM tokens", "16 x 3 x 1024 int64", "cutting windows out of a text", lambda _: Tokens(), 16),
    Workload("Cached images", "64 x 3 x 224 x 224 uint8", "reading mapped memory", CachedImages, 64),
    Workload("JPEG decode + augment", "32 x 3 x 224 x 224 uint8", "decoding and augmenting", Photographs, 32),
    Workload(
        "JPEG, second epoch, cached",
        "32 x 3 x 224 x 224 uint8",
        "cropping and flipping",
        lambda data: Epochs(Resized(data), crop_and_flip),
        32,
        cached,
    ),
]


def write_files(data: Path) -> None:
    """Writes `images.npy` (39 MB) and `photographs/*.jpg` (4 MB), unless they exist.

    The images are parts of two photographs from scikit-learn.
    """
    if (data / "photographs").exists():
        return
    from sklearn.datasets import load_sample_images

    photographs, random = load_sample_images().images, np.random.default_rng(0)

    def part(number: int, height: int, width: int) -> np.ndarray:
        whole: np.ndarray = photographs[number % len(photographs)]
        top, left = random.integers(whole.shape[0] - height), random.integers(whole.shape[1] - width)
        return whole[top : top + height, left : left + width]

    data.mkdir(parents=True, exist_ok=True)
    # The rename comes last, so that Ctrl-C leaves all files or none.
    with tempfile.TemporaryDirectory(dir=data) as unfinished:
        new = Path(unfinished)
        images = np.stack([part(number, SIDE, SIDE).transpose(2, 0, 1) for number in range(256)])
        np.save(new / "images.npy", images)
        (new / "photographs").mkdir()
        for number in range(64):
            Image.fromarray(part(number, 375, 500)).save(new / "photographs" / f"{number:02d}.jpg", quality=90)
        (new / "images.npy").replace(data / "images.npy")
        (new / "photographs").rename(data / "photographs")
