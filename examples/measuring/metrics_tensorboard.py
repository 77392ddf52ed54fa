"""Writes the statistics of a loader to TensorBoard during training, and prints its bottleneck at the end.

Each sample takes time, as decoding does; `--sample-ms` and `--step-ms` shift the balance between loading and training.
"""

import argparse
import time

import torch
from torch.utils.data import Dataset

import rustloader

EXAMPLES = """\
examples:
  python examples/measuring/metrics_tensorboard.py                   two workers that cannot keep up
  python examples/measuring/metrics_tensorboard.py --workers 5       the number that the verdict recommends
  python examples/measuring/metrics_tensorboard.py --step-ms 100     a training step that takes longer than loading
  tensorboard --logdir runs                                          view the curves
"""


class Images(Dataset):
    """Random images; each takes ``seconds`` to create."""

    def __init__(self, n: int, seconds: float) -> None:
        self.n, self.seconds = n, seconds

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        return torch.rand(3, 32, 32), i % 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", type=int, default=50, help="batches per epoch")
    parser.add_argument("--sample-ms", type=float, default=5.0)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two points of the curves")
    parser.add_argument("--logdir", default=None, help="default: a folder under runs/")
    options = parser.parse_args()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        parser.exit(1, f"error: this example needs TensorBoard: pip install tensorboard ({error})\n")

    dataset = Images(8 * options.batches, options.sample_ms / 1000)
    loader = rustloader.DataLoader(dataset, batch_size=8, num_workers=options.workers, persistent_workers=True)
    writer = SummaryWriter(options.logdir)

    def write(stats: rustloader.Stats) -> None:
        for name, value in stats.scalars().items():
            writer.add_scalar(f"loader/{name}", value, global_step=stats.batches)

    with writer, rustloader.report(loader, write, every=options.every):
        for _ in range(options.epochs):
            for _images, _labels in loader:
                time.sleep(options.step_ms / 1000)  # the training step
    stats = rustloader.stats(loader)
    print(stats)
    print(stats.verdict())


if __name__ == "__main__":
    main()
