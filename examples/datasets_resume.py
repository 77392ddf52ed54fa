"""datasets: Parquet files by index, or as a stream with a state of its own. Stop it at any moment and start it again.

python examples/datasets_resume.py --folder run
python examples/datasets_resume.py --folder run --stream
"""

import os
from pathlib import Path

import datasets
import torch
from stoppable import Steps, arguments, newest
from torch import nn

from rustloader import StatefulDataLoader

SHARDS = 4


def write_files(folder: Path) -> list[str]:
    """Files of several row groups each, the same in each run."""
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
    parser.add_argument("--stream", action="store_true", help="an IterableDataset")
    options = parser.parse_args()
    datasets.disable_progress_bars()
    files, cache = write_files(options.folder / "files"), str(options.folder / "cache")
    data = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=cache, streaming=options.stream
    ).with_format("torch")
    if options.stream:
        # The state of datasets holds neither a shuffle buffer nor its inputs: only the order of the files is shuffled.
        data = data.shuffle(seed=7, buffer_size=1, max_buffer_input_shards=1)
    shuffle = None if options.stream else True

    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    loader = StatefulDataLoader(data, batch_size=16, shuffle=shuffle, num_workers=2)
    first_epoch, step = 0, 0
    checkpoint = newest(options.folder)
    if checkpoint is not None:
        saved = torch.load(checkpoint)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        torch.set_rng_state(saved["random"])
        first_epoch, step = saved["epoch"], saved["step"]

    steps = Steps(options.step_seconds)
    for epoch in range(first_epoch, 3):
        if options.stream:
            data.set_epoch(epoch)  # another order of the files
        for batch in loader:
            loss = nn.functional.mse_loss(net(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            steps.show(step, f"loss {loss.item()}")
            if step % options.every == 0:
                saved = {
                    "net": net.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                    "random": torch.get_rng_state(),
                    "epoch": epoch,
                    "step": step,
                }
                file = options.folder / f"step-{step}"
                torch.save(saved, file.with_suffix(".new"))
                os.replace(file.with_suffix(".new"), file)


if __name__ == "__main__":
    main()
