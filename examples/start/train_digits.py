"""Trains a small net on image files, first through torch's DataLoader, then through rustloader's.

The images are scikit-learn's handwritten digits, written once as PNG files, one folder per class. The workers
read them with Pillow and augment them with torch's random numbers. Both runs start from the same seed, so
both must see the same batches in the same order, and the losses must agree to the last bit. If they do not,
the program fails.
"""

import argparse
import math
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from PIL import Image
from torch import nn
from tqdm import tqdm

import rustloader

SIDE = 16  # the net sees images of 16 x 16 pixels
SEED = 7
EPOCHS = 6
ACCURACY_GOAL = 0.97

EXAMPLES = """\
examples:
  python examples/start/train_digits.py                          6 epochs through each loader, with 2 workers
  python examples/start/train_digits.py --epochs 1 --workers 4   one short epoch with more workers
  python examples/start/train_digits.py --start-method spawn     workers that are new interpreters

The exit status is 0 only if all losses are bit-identical, the Rust engine delivered every batch of the second
run, and the net reached 97 % on the test images (not checked with fewer than the default number of epochs).
"""


@dataclass(frozen=True)
class Settings:
    """The settings of a training run."""

    data: Path = Path(__file__).resolve().parent / "data" / "digits"  # the folder of the PNG files
    epochs: int = EPOCHS
    workers: int = 2
    batch_size: int = 32
    start_method: str | None = None  # start method of the workers; None for Python's default


def write_images(root: Path) -> None:
    """Writes scikit-learn's digits as `root/{train,test}/{0..9}/*.png`, unless they exist.

    Every fifth image of a class is for testing.
    """
    if any(root.glob("train/*/*.png")):
        return
    from sklearn.datasets import load_digits

    digits = load_digits()
    seen = [0] * 10
    root.parent.mkdir(parents=True, exist_ok=True)
    # The rename comes last, so that Ctrl-C leaves all files or none.
    with tempfile.TemporaryDirectory(dir=root.parent) as unfinished:
        new = Path(unfinished) / root.name
        for pixels, label in zip(digits.images, digits.target.tolist(), strict=True):
            split = "test" if seen[label] % 5 == 4 else "train"
            folder = new / split / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            gray = np.rint(pixels * (255 / 16)).astype(np.uint8)  # the pixels of load_digits are 0 to 16
            Image.fromarray(gray).save(folder / f"{seen[label]:04d}.png")
            seen[label] += 1
        new.rename(root)
    print(f"Wrote {sum(seen):,} PNG files to {root}.")


class ImageFolder(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Gray images in a tree with one folder per class.

    A sample is a float32 tensor of shape 1 x SIDE x SIDE, and the index of its class.
    """

    def __init__(self, root: Path, augment: bool):
        self.files = sorted(root.glob("*/*.png"))
        self.labels = [int(file.parent.name) for file in self.files]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files[index]) as file:
            image = file.convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        if self.augment:
            turn, right, down = (torch.rand(3) * 2 - 1).tolist()
            image = image.rotate(10 * turn, Image.Resampling.BILINEAR, translate=(right, down))
        pixels = torch.from_numpy(np.array(image, dtype=np.float32)).unsqueeze(0) / 255
        if self.augment:
            pixels += 0.05 * torch.randn(pixels.shape)
        return pixels, self.labels[index]


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (SIDE // 4) ** 2, 10),
    )


@dataclass
class Outcome:
    """The results of one training run."""

    losses: list[float] = field(default_factory=list)  # per epoch: the mean loss
    seconds: list[float] = field(default_factory=list)  # per epoch: wall time, including the start of the workers
    first_batch: list[float] = field(default_factory=list)  # per epoch: seconds until the first batch
    images: int = 0  # training images seen
    batches: int = 0  # batches seen, training and test
    engine_batches: int = 0  # batches that the Rust engine delivered
    accuracy: float = 0.0  # on the test images


def train_and_test(name: str, loader_class: type[torch.utils.data.DataLoader[Any]], settings: Settings) -> Outcome:
    """Trains and tests a net. Only `loader_class` differs between the two runs."""
    arguments: dict[str, Any] = {
        "batch_size": settings.batch_size,
        "num_workers": settings.workers,
        "multiprocessing_context": settings.start_method,
    }
    train_set = ImageFolder(settings.data / "train", augment=True)
    test_set = ImageFolder(settings.data / "test", augment=False)
    train_loader = loader_class(train_set, shuffle=True, **arguments)
    test_loader = loader_class(test_set, **arguments)

    torch.manual_seed(SEED)  # seeds the weights, the order of the images and the workers' augmentations
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, epochs=settings.epochs, steps_per_epoch=len(train_loader)
    )
    loss_of = nn.CrossEntropyLoss()
    outcome = Outcome()
    delivered_before = rustloader.engine_batches()

    for epoch in range(1, settings.epochs + 1):
        net.train()
        loss_sum = 0.0
        title = f"{name:<10}  epoch {epoch}/{settings.epochs}"
        # disable=None: no bar if stderr is not a terminal.
        with tqdm(total=len(train_set), desc=title, unit=" images", dynamic_ncols=True, disable=None) as bar:
            start = time.perf_counter()
            for step, (images, labels) in enumerate(train_loader):
                if step == 0:
                    outcome.first_batch.append(time.perf_counter() - start)
                loss = loss_of(net(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                loss_sum += loss.item() * len(labels)
                outcome.images += len(labels)
                outcome.batches += 1
                bar.update(len(labels))
                bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            outcome.seconds.append(time.perf_counter() - start)
        outcome.losses.append(loss_sum / len(train_set))

    net.eval()
    correct = 0
    with torch.inference_mode():
        for images, labels in test_loader:
            correct += int((net(images).argmax(dim=1) == labels).sum())
            outcome.batches += 1
    outcome.accuracy = correct / len(test_set)
    outcome.engine_batches = rustloader.engine_batches() - delivered_before
    return outcome


def train_with_both(settings: Settings) -> tuple[Outcome, Outcome]:
    """Trains twice, through torch's loader and through rustloader's; nothing else differs."""
    write_images(settings.data)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the workers need the other cores; a fixed number keeps sums in the same order
    tqdm.monitor_interval = 0  # no helper thread, because workers are forked from this process
    # The first use of a net takes longer, so it happens before both runs.
    make_net()(torch.zeros(settings.batch_size, 1, SIDE, SIDE)).sum().backward()
    theirs = train_and_test("torch", torch.utils.data.DataLoader, settings)
    ours = train_and_test("rustloader", rustloader.DataLoader, settings)
    return theirs, ours


def _row(what: str, left: str, right: str, note: str = "") -> None:
    print(f"  {what:<24}{left:>20}{right:>20}  {note}".rstrip())


def print_proof(theirs: Outcome, ours: Outcome) -> None:
    """Prints the values that must be equal in both runs."""
    _row("", "torch", "rustloader")
    for epoch, (a, b) in enumerate(zip(theirs.losses, ours.losses, strict=True), start=1):
        _row(f"loss, epoch {epoch}", f"{a:.17f}", f"{b:.17f}", "identical" if a == b else "DIFFERENT")
    _row("test accuracy", f"{theirs.accuracy:.2%}", f"{ours.accuracy:.2%}")
    _row("batches", f"{theirs.batches}", f"{ours.batches}")
    _row("from the Rust engine", f"{theirs.engine_batches}", f"{ours.engine_batches}")


def print_times(theirs: Outcome, ours: Outcome) -> None:
    """Prints the durations of both runs."""
    runs = (theirs, ours)
    _row("time per epoch", *(f"{sum(run.seconds) / len(run.seconds):.3f} s" for run in runs))
    _row("images/s", *(f"{run.images / sum(run.seconds):,.0f}" for run in runs))
    _row("time to first batch", *(f"{1e3 * sum(run.first_batch) / len(run.first_batch):.1f} ms" for run in runs))


def complaints(theirs: Outcome, ours: Outcome, settings: Settings) -> list[str]:
    """Returns a description of each broken promise; empty if all are kept."""
    problems = []
    if ours.losses != theirs.losses or not all(map(math.isfinite, ours.losses)):
        problems.append("the losses of the two runs are not bit-identical")
    if ours.accuracy != theirs.accuracy:
        problems.append("the two nets have different accuracies on the test images")
    if settings.epochs >= EPOCHS and min(ours.accuracy, theirs.accuracy) < ACCURACY_GOAL:
        problems.append(f"the test accuracy is below {ACCURACY_GOAL:.0%}")
    if theirs.engine_batches != 0:
        problems.append(f"the Rust engine delivered {theirs.engine_batches} batches of torch's run")
    if ours.engine_batches != ours.batches:
        problems.append(f"the Rust engine delivered only {ours.engine_batches} of {ours.batches} batches")
    return problems


def parse_arguments() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, Settings()
    add("--epochs", type=int, default=default.epochs, help="epochs per run (default: %(default)s)")
    add("--workers", type=int, default=default.workers, help="worker processes (default: %(default)s)")
    add("--batch-size", type=int, default=default.batch_size, help="images per batch (default: %(default)s)")
    add(
        "--data",
        type=Path,
        default=default.data,
        help="folder of the PNG files (default: examples/start/data/digits)",
    )
    methods = torch.multiprocessing.get_all_start_methods()
    add("--start-method", choices=methods, help="how workers start (default: Python's default)")
    settings = Settings(**vars(parser.parse_args()))
    for name in ("epochs", "workers", "batch_size"):
        if getattr(settings, name) < 1:
            option = "--" + name.replace("_", "-")
            parser.error(f"{option} must be a positive integer, got {getattr(settings, name)}")
    return settings


def main() -> int:
    settings = parse_arguments()
    theirs, ours = train_with_both(settings)
    print_proof(theirs, ours)
    print_times(theirs, ours)
    problems = complaints(theirs, ours, settings)
    for problem in problems:
        print(f"FAILED: {problem}")
    if not problems:
        print("Same losses to the last bit, and the Rust engine delivered every batch of the second run.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
