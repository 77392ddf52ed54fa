"""torchvision: image files by ImageFolder, v2 transforms in the workers, MixUp in the collate function.

python examples/torchvision_folder.py
python examples/torchvision_folder.py --no-install                      on torch's loader: the same losses
python -m rustloader run examples/torchvision_folder.py --no-install    on the engine, switched from outside
"""

import argparse
import tempfile
from pathlib import Path

import torch
from small_data import write_images
from torch import nn
from torch.utils.data import DataLoader, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import rustloader

AUGMENT = v2.Compose(
    [
        v2.ToImage(),  # a tv_tensors.Image
        v2.RandomResizedCrop(32, scale=(0.8, 1.0), antialias=True),
        v2.ColorJitter(brightness=0.3, contrast=0.3),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.5] * 3),
    ]
)
PLAIN = v2.Compose([v2.ToImage(), v2.Resize(32, antialias=True), v2.ToDtype(torch.float32, scale=True)])
mix = v2.MixUp(num_classes=4, alpha=0.2)


def mixed(samples: list) -> tuple[torch.Tensor, torch.Tensor]:
    return mix(*default_collate(samples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-install", dest="install", action="store_false", help="leave torch's loader in place")
    options = parser.parse_args()
    if options.install:
        rustloader.install()

    torch.manual_seed(7)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )
    net(torch.zeros(1, 3, 32, 32))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    with tempfile.TemporaryDirectory() as folder:
        root = write_images(Path(folder) / "images")
        training = DataLoader(
            ImageFolder(root, AUGMENT), batch_size=8, shuffle=True, num_workers=2, collate_fn=mixed, drop_last=True
        )
        testing = DataLoader(ImageFolder(root, PLAIN), batch_size=16, num_workers=2)
        for epoch in range(2):
            losses = []
            for images, labels in training:
                loss = nn.functional.cross_entropy(net(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            with torch.no_grad():
                test = torch.stack([nn.functional.cross_entropy(net(images), labels) for images, labels in testing])
            print(f"epoch {epoch}: loss {torch.stack(losses).mean().item()}, test {test.mean().item()}")
        print(f"batches are {type(images).__name__}, {type(labels).__name__}")
    print(f"process 0: {rustloader.engine_batches()} batches from the engine")


if __name__ == "__main__":
    main()
