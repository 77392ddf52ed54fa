"""Train a small net on image files, first through torch's DataLoader, then through rustloader's.

The images are scikit-learn's handwritten digits, written once as PNG files, one folder a class. The workers
read them with Pillow and augment them with torch's random numbers. Both passes start from the same seed, so
both must see the same batches in the same order: the losses have to agree to the last bit. The program says
so, or fails.
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

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
  python examples/train_digits.py                          the whole demonstration
  python examples/train_digits.py --epochs 1 --workers 4   one short pass with more workers
  python examples/train_digits.py --start-method spawn     workers that start from scratch

The exit status is 0 only if all losses are bit-identical, every batch of the second pass came from the Rust
engine, and the net reached 97 % on the test images (asked for from the default number of epochs on).
"""


def write_images(root: Path) -> None:
    """Write scikit-learn's digits as `root/{train,test}/{0..9}/*.png`; every fifth one is for testing."""
    done = root / ".complete"
    if done.exists():
        return
    from sklearn.datasets import load_digits

    digits = load_digits()
    seen = [0] * 10
    for pixels, label in zip(digits.images, digits.target.tolist(), strict=True):
        split = "test" if seen[label] % 5 == 4 else "train"
        folder = root / split / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        gray = np.rint(pixels * (255 / 16)).astype(np.uint8)  # the pixels of load_digits are 0 to 16
        Image.fromarray(gray).save(folder / f"{seen[label]:04d}.png")
        seen[label] += 1
    done.touch()
    print(f"wrote {sum(seen)} PNG files under {root}")


class ImageFolder(torch.utils.data.Dataset):
    """Gray images in a class-per-folder tree: (float32 tensor of 1 x SIDE x SIDE, class index)."""

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
    """What one pass has measured."""

    losses: list[float] = field(default_factory=list)  # of each epoch: the mean loss
    seconds: list[float] = field(default_factory=list)  # of each epoch: wall time, workers' start included
    first_batch: list[float] = field(default_factory=list)  # of each epoch: seconds until the first batch
    images: int = 0  # training images seen
    batches: int = 0  # batches seen, training and test
    engine_batches: int = 0  # how many of them the Rust engine delivered
    accuracy: float = 0.0  # on the test images


def train_and_test(name: str, loader_class: type[torch.utils.data.DataLoader], options: argparse.Namespace) -> Outcome:
    """One whole training run. Only `loader_class` differs between the two passes."""
    settings = {
        "batch_size": options.batch_size,
        "num_workers": options.workers,
        "multiprocessing_context": options.start_method,
    }
    train_set = ImageFolder(options.data / "train", augment=True)
    test_set = ImageFolder(options.data / "test", augment=False)
    train_loader = loader_class(train_set, shuffle=True, **settings)
    test_loader = loader_class(test_set, **settings)

    torch.manual_seed(SEED)  # weights, order of the images and the workers' augmentations all follow from it
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, epochs=options.epochs, steps_per_epoch=len(train_loader)
    )
    loss_of = nn.CrossEntropyLoss()
    outcome = Outcome()
    delivered_before = rustloader.engine_batches()

    for epoch in range(1, options.epochs + 1):
        net.train()
        loss_sum = 0.0
        title = f"{name:<10}  epoch {epoch}/{options.epochs}"
        with tqdm(total=len(train_set), desc=title, unit=" images", dynamic_ncols=True) as bar:
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
                bar.set_postfix(loss=f"{loss_sum / bar.n:.4f}", refresh=False)
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


def print_table(ours: Outcome, theirs: Outcome) -> None:
    """Both passes, side by side."""

    def row(what: str, left: str, right: str, note: str = "") -> None:
        print(f"{what:<28}{left:>20}{right:>20}  {note}".rstrip())

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    print()
    row("", "torch", "rustloader")
    for epoch, (a, b) in enumerate(zip(theirs.losses, ours.losses, strict=True), start=1):
        row(f"loss, epoch {epoch}", f"{a:.17f}", f"{b:.17f}", "identical" if a == b else "DIFFERENT")
    row("test accuracy", f"{theirs.accuracy:.2%}", f"{ours.accuracy:.2%}")
    row("time an epoch", f"{mean(theirs.seconds):.3f} s", f"{mean(ours.seconds):.3f} s")
    row("images/s", *(f"{run.images / sum(run.seconds):,.0f}" for run in (theirs, ours)))
    row("time to first batch", *(f"{1e3 * mean(run.first_batch):.1f} ms" for run in (theirs, ours)))
    row("batches", f"{theirs.batches}", f"{ours.batches}")
    row("... by the Rust engine", f"{theirs.engine_batches}", f"{ours.engine_batches}")
    print()


def complaints(ours: Outcome, theirs: Outcome, options: argparse.Namespace) -> list[str]:
    """What went against the promise; empty if all is well."""
    found = []
    if ours.losses != theirs.losses or not all(map(math.isfinite, ours.losses)):
        found.append("the losses of the two passes are not bit-identical")
    if ours.accuracy != theirs.accuracy:
        found.append("the two nets do not score the same on the test images")
    if options.epochs >= EPOCHS and min(ours.accuracy, theirs.accuracy) < ACCURACY_GOAL:
        found.append(f"the test accuracy is below {ACCURACY_GOAL:.0%}")
    if theirs.engine_batches != 0:
        found.append(f"{theirs.engine_batches} batches of torch's pass came from the Rust engine")
    if ours.engine_batches != ours.batches:
        found.append(f"only {ours.engine_batches} of {ours.batches} batches came from the Rust engine")
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="epochs a pass (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="images a batch (default: %(default)s)")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(__file__).resolve().parent / "data" / "digits",
        help="folder for the PNG files (default: data/digits beside this file)",
    )
    parser.add_argument(
        "--start-method",
        choices=torch.multiprocessing.get_all_start_methods(),
        help="how workers start (default: Python's own choice)",
    )
    options = parser.parse_args()
    if min(options.epochs, options.workers, options.batch_size) < 1:
        parser.error("--epochs, --workers and --batch-size must be at least 1")
    return options


def main() -> int:
    options = parse_arguments()
    write_images(options.data)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the workers need the other cores; a fixed number keeps sums in the same order
    tqdm.monitor_interval = 0  # no helper thread: the workers are forked from this process
    # The first use of the net takes longer; neither pass shall pay for it.
    make_net()(torch.zeros(options.batch_size, 1, SIDE, SIDE)).sum().backward()

    theirs = train_and_test("torch", torch.utils.data.DataLoader, options)
    ours = train_and_test("rustloader", rustloader.DataLoader, options)

    print_table(ours, theirs)
    problems = complaints(ours, theirs, options)
    for problem in problems:
        print(f"FAILED: {problem}")
    if not problems:
        print("Same losses to the last bit, and every batch of the second pass came from the Rust engine.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
