"""A training loop whose decoding runs on the CPU nodes of a Ray cluster.

pip install 'rustloader[ray]'
python examples/clusters/ray_train.py                                          Ray starts a cluster on this machine
RAY_ADDRESS=head:6379 python examples/clusters/ray_train.py --workers 16       on a cluster
RAY_ADDRESS=head:6379 python examples/clusters/ray_train.py --on decoding      on its nodes with the resource `decoding`
"""

import argparse
import zlib

import torch
from torch import nn
from torch.utils.data import Dataset

import rustloader
import rustloader.ray

SIDE = 64


class Images(Dataset):
    """Compressed images of noise with a bright square; the class is the corner with the square.

    Replace this dataset with one that reads files that all nodes can access.
    """

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.images = []
        for i in range(n):
            pixels = torch.randint(0, 128, (3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
            row, column = i % 4 // 2 * SIDE // 2, i % 2 * SIDE // 2
            pixels[:, row : row + SIDE // 2, column : column + SIDE // 2] += 100
            self.images.append(zlib.compress(pixels.numpy()))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        pixels = torch.frombuffer(bytearray(zlib.decompress(self.images[i])), dtype=torch.uint8)
        # The jitter uses the worker's random numbers. In uint8, an image takes a quarter of the bytes of float32.
        return pixels.view(3, SIDE, SIDE).roll(int(torch.randint(-4, 5, ())), dims=2), i % 4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="workers, each of them an actor (default: %(default)s)")
    parser.add_argument("--cpus", type=float, default=0.5, help="CPUs reserved for each worker (default: %(default)s)")
    parser.add_argument("--on", metavar="RESOURCE", help="run workers only on nodes that have this resource")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(7)
    resources = {options.on: options.cpus} if options.on else None
    loader = rustloader.DataLoader(
        Images(512),
        batch_size=16,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=True,
        multiprocessing_context=rustloader.ray.RayContext(num_cpus=options.cpus, resources=resources),
        # If a worker is lost with its node, another one replaces it and makes the same batches.
        max_restarts=8,
        seed_by="sample",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3 * (SIDE // 8) ** 2, 4)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(options.epochs):
        losses = []
        for images, labels in loader:
            loss = nn.functional.cross_entropy(net(images.to(device).float() / 255), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        print(f"epoch {epoch}: loss {torch.stack(losses).mean().item():.6f} over {len(losses)} batches", flush=True)
    print(rustloader.stats(loader).verdict())


if __name__ == "__main__":
    main()
