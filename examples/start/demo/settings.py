"""The settings of the demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Settings"]

DATA = Path(__file__).resolve().parents[1] / "data"


@dataclass(frozen=True)
class Settings:
    """The options of the command line.

    Attributes:
        seconds: the length of a measured pass.
        rounds: passes per loader and workload.
        workers: worker processes per loader.
        step: seconds of the training step after each batch. The step sleeps, as a loop that waits for a GPU does.
        epochs: number of training epochs in part 2.
        data: the folder for the image files.
        plot: the file to which the picture is written.
        markdown: whether to print the table in Markdown.
    """

    seconds: float = 1.0
    rounds: int = 3
    workers: int = 2
    step: float = 0.002
    epochs: int = 2
    data: Path = DATA
    plot: Path = Path("demo.png")
    markdown: bool = False
