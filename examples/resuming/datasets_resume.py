"""datasets: Parquet files by index, or as a stream with its own state. Stop it at any moment and run it again.

python examples/resuming/datasets_resume.py --folder run
python examples/resuming/datasets_resume.py --folder run --stream
"""

import os
from pathlib import Path

import datasets
import torch
from resume_train import train
from stoppable import arguments
from torch import nn

from rustloader import StatefulDataLoader

SHARDS = 4


def write_files(folder: Path) -> list[str]:
    """Writes files with several row groups each, unless they exist, and returns their names."""
    random = torch.Generator().manual_seed(7)
    files = []
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(SHARDS):
        x = torch.rand(64, 8, generator=random)
        rows = datasets.Dataset.from_dict({"x": x.tolist(), "y": x.sum(1).tolist()})
        files.append(str(folder / f"part-{shard}.parquet"))
        if not os.path.exists(files[-1]):
            rows.to_parquet(files[-1], batch_size=10)
    return files


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--stream", action="store_true", help="use an IterableDataset")
    options = parser.parse_args()
    datasets.disable_progress_bars()
    files, cache = write_files(options.folder / "files"), str(options.folder / "cache")
    data = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=cache, streaming=options.stream
    ).with_format("torch")
    if options.stream:
        # The state of a datasets stream contains neither the shuffle buffer nor its inputs, so only the order of the
        # files is shuffled.
        data = data.shuffle(seed=7, buffer_size=1, max_buffer_input_shards=1)

    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
    loader = StatefulDataLoader(data, batch_size=16, shuffle=None if options.stream else True, num_workers=2)

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(net(batch["x"]), batch["y"])

    if options.stream:
        train(net, loader, loss_of, options, set_epoch=data.set_epoch)  # the order of the files differs by epoch
    else:
        train(net, loader, loss_of, options)


if __name__ == "__main__":
    main()
