"""Shared parts of these examples: options, a small dataset, printed steps, and the newest checkpoint."""

import argparse
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset


def arguments(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints are")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0, help="longer steps leave time to stop the program")
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


class Steps:
    """A printer of training steps: a line for each step of a rank, then a pause of ``step_seconds``."""

    def __init__(self, step_seconds: float, rank: int = 0) -> None:
        self.step_seconds = step_seconds
        self.rank = rank

    def show(self, step: int, what: str) -> None:
        # A single write keeps lines of different processes from mixing.
        sys.stdout.write(f"rank {self.rank} step {step}: {what}\n")
        sys.stdout.flush()
        time.sleep(self.step_seconds)


def newest(folder: Path) -> Path | None:
    """Returns the checkpoint of the latest step; None if there is none.

    A checkpoint is a file or a folder with a name like `step-12`, perhaps with a suffix. The suffix `.new` marks an
    unfinished checkpoint, which is ignored.
    """
    checkpoints = {
        int(path.stem.removeprefix("step-")): path for path in folder.glob("step-*") if path.suffix != ".new"
    }
    return checkpoints[max(checkpoints)] if checkpoints else None
