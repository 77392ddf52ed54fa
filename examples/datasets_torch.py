"""datasets: Parquet files as a dataset by index, then as a stream with a shuffle buffer, both `with_format("torch")`.

python examples/datasets_torch.py
python examples/datasets_torch.py --no-install                      on torch's loader: the same losses
python -m rustloader run examples/datasets_torch.py --no-install    on the engine, switched from outside
"""

import argparse
import tempfile
from pathlib import Path

import datasets
import torch
from torch import nn
from torch.utils.data import DataLoader

import rustloader

SHARDS = 4


def write_files(folder: Path) -> list[str]:
    random = torch.Generator().manual_seed(7)
    files = []
    for shard in range(SHARDS):
        x = torch.rand(64, 8, generator=random)
        rows = datasets.Dataset.from_dict({"x": x.tolist(), "y": x.sum(1).tolist(), "name": [f"{shard}"] * 64})
        files.append(str(folder / f"part-{shard}.parquet"))
        rows.to_parquet(files[-1])
    return files


def train(title: str, loader: DataLoader, dataset: datasets.Dataset | datasets.IterableDataset) -> None:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(2):
        if isinstance(dataset, datasets.IterableDataset):
            dataset.set_epoch(epoch)  # another order; persistent workers see it through shared memory
        losses, first = [], None
        for batch in loader:
            first = first or batch["name"]
            loss = nn.functional.mse_loss(net(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        order = "".join(first or "")
        print(f"{title}: epoch {epoch}: loss {torch.stack(losses).mean().item()}, {len(losses)} batches from {order}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-install", dest="install", action="store_false", help="leave torch's loader in place")
    options = parser.parse_args()
    if options.install:
        rustloader.install()

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder))
        cache = str(Path(folder) / "cache")

        rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache).with_format("torch")
        train("by index", DataLoader(rows, batch_size=16, shuffle=True, num_workers=2), rows)

        stream = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache, streaming=True)
        stream = stream.with_format("torch").shuffle(seed=7, buffer_size=32)
        train("stream", DataLoader(stream, batch_size=16, num_workers=2, persistent_workers=True), stream)
        print(f"process 0: {rustloader.engine_batches()} batches from the engine")


if __name__ == "__main__":
    main()
