"""webdataset: tar shards on this machine, decoded and batched in the workers, through its WebLoader.

python examples/webdataset_shards.py
python examples/webdataset_shards.py --no-install                      on torch's loader: the same losses
python -m rustloader run examples/webdataset_shards.py --no-install    on the engine, switched from outside
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
import webdataset as wds
from torch import nn

import rustloader


def write_shards(folder: Path, shards: int = 4, each: int = 32) -> list[str]:
    random = np.random.default_rng(7)
    names = [str(folder / f"part-{shard}.tar") for shard in range(shards)]
    for shard, name in enumerate(names):
        with wds.TarWriter(name) as tar:
            for number in range(each):
                label = number % 4
                pixels = random.integers(0, 128, (16, 16, 3), dtype=np.uint8)
                pixels[4 * label : 4 * label + 4] += 100
                tar.write({"__key__": f"{shard}-{number:03d}", "png": pixels, "cls": label})
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-install", dest="install", action="store_false", help="leave torch's loader in place")
    options = parser.parse_args()
    if options.install:
        rustloader.install()

    torch.manual_seed(7)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    with tempfile.TemporaryDirectory() as folder:
        # detshuffle has the same order in each run; shuffle() is seeded with the time and the process id.
        dataset = (
            wds.WebDataset(write_shards(Path(folder)), shardshuffle=4, detshuffle=True, seed=7)
            .compose(wds.detshuffle(32, seed=7))
            .decode("torchrgb")
            .to_tuple("png", "cls")
            .batched(8)
        )
        loader = wds.WebLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
        for epoch in range(2):
            losses = []
            for images, labels in loader:
                loss = nn.functional.cross_entropy(net(images), torch.as_tensor(labels))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            print(f"epoch {epoch}: loss {torch.stack(losses).mean().item()} over {len(losses)} batches")
    print(f"process 0: {rustloader.engine_batches()} batches from the engine")


if __name__ == "__main__":
    main()
