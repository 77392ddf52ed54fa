"""torchrun: a DistributedSampler; a stopped epoch continues with a different number of processes.

torchrun --nproc-per-node 2 examples/resuming/torchrun_reshard.py --folder run
torchrun --nproc-per-node 4 examples/resuming/torchrun_reshard.py --folder run
"""

import os
import sys

import torch
import torch.distributed as dist
from stoppable import Points, Steps, arguments, newest
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from rustloader import StatefulDataLoader
from rustloader.stateful_dataloader import reshard


class Numbered(Points):
    """Points with their indices."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, int]:  # type: ignore[override]
        return *super().__getitem__(i), i


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.exit(2, f"error: start this with torchrun: torchrun --nproc-per-node 2 {sys.argv[0]}\n")

    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0)))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    dataset = Numbered(768)
    sampler = DistributedSampler(dataset, seed=7)
    torch.manual_seed(7 + rank)  # so that the workers of different ranks draw different random numbers
    loader = StatefulDataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2, seed_by="sample")
    first_epoch, step = 0, 0
    checkpoint = newest(options.folder)
    if checkpoint is not None:
        saved = torch.load(checkpoint)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        states, first_epoch, step = saved["loaders"], saved["epoch"], saved["step"]
        sampler.set_epoch(first_epoch)
        if len(states) != processes:
            states = reshard(states, processes)
        else:
            torch.set_rng_state(saved["random"][rank])
        loader.load_state_dict(states[rank])

    steps = Steps(options.step_seconds, rank)
    for epoch in range(first_epoch, options.epochs):
        sampler.set_epoch(epoch)
        for points, above, numbers in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(net(points), above)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            steps.show(step, f"epoch {epoch} loss {loss.item()} samples {numbers.tolist()}")
            if step % options.every == 0:
                mine, all_of_them = (loader.state_dict(), torch.get_rng_state()), [None] * processes
                dist.gather_object(mine, all_of_them if rank == 0 else None)
                if rank == 0:
                    saved = {
                        "net": net.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "loaders": [state for state, _ in all_of_them],
                        "random": [random for _, random in all_of_them],
                        "epoch": epoch,
                        "step": step,
                    }
                    file = options.folder / f"step-{step}"
                    options.folder.mkdir(parents=True, exist_ok=True)
                    torch.save(saved, file.with_suffix(".new"))
                    os.replace(file.with_suffix(".new"), file)
                # All processes wait until the file exists.
                dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
