"""Shared parts of the examples in this folder: options and a small dataset. Replace the dataset with your own."""

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with `--no-install`, which leaves torch's loader in place. The losses do not change."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-install", dest="install", action="store_false", help="leave torch's loader in place")
    return parser


class Points(Dataset):
    """Points in the plane, jittered with the worker's random numbers; a point's class is its side of a curve."""

    def __init__(self, n: int) -> None:
        self.points = torch.rand(n, 2, generator=torch.Generator().manual_seed(n)) * 2 - 1

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.points[i]
        return self.points[i] + 0.01 * torch.randn(2), (y > torch.sin(3 * x)).float()


def write_images(root: Path, classes: int = 4, each: int = 16, side: int = 40) -> Path:
    """Writes PNG files `root/0/000.png` and so on: noise with a bright square; the class is the square's corner."""
    # Imported here, because the examples that train on points do not need these modules.
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(7)
    for label in range(classes):
        (root / str(label)).mkdir(parents=True)
        row, column = (label // 2) * side // 2, (label % 2) * side // 2
        for number in range(each):
            pixels = random.integers(0, 128, (side, side, 3), dtype=np.uint8)
            pixels[row : row + side // 2, column : column + side // 2] += 100
            Image.fromarray(pixels).save(root / str(label) / f"{number:03d}.png")
    return root
