"""torchrun: DistributedDataParallel over gloo with a DistributedSampler.

torchrun --nproc-per-node 2 examples/frameworks/torchrun_ddp.py
torchrun --nproc-per-node 2 examples/frameworks/torchrun_ddp.py --no-install     on torch's loader
torchrun --nproc-per-node 2 -m rustloader run examples/frameworks/torchrun_ddp.py --no-install
"""

import sys

import torch
import torch.distributed as dist
from small_data import Points, arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import rustloader


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    if options.install:
        rustloader.install()
    if not dist.is_torchelastic_launched():
        parser.exit(2, f"error: start this with torchrun: torchrun --nproc-per-node 2 {sys.argv[0]}\n")

    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0)))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    dataset = Points(256)
    sampler = DistributedSampler(dataset, seed=7)
    torch.manual_seed(7 + rank)  # so that the workers of different ranks draw different random numbers
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=2, persistent_workers=True)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        losses = []
        for points, above in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(net(points), above)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        total = torch.stack(losses).mean()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / processes}")
    print(f"process {rank}: {rustloader.engine_batches()} batches from the engine", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
