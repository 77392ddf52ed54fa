"""A loop like torchtitan's, whose distributed checkpoints contain the state of each rank's loader and packed texts.

torchrun --nproc-per-node 2 examples/resuming/titan_resume.py --folder run
"""

import os
import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from stoppable import Steps, arguments, newest
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from rustloader import StatefulDataLoader

WORDS = 50
LENGTH = 16


class BaseDataLoader(Stateful, ABC):
    """The interface that the trainer requires of a loader."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...


class ParallelAwareDataloader(StatefulDataLoader, BaseDataLoader):
    """The loader of one rank. Its state is keyed by rank, so that one checkpoint can contain all ranks' states."""

    dp_rank: int
    dp_world_size: int

    def __init__(self, dataset: IterableDataset, dp_rank: int, dp_world_size: int, batch_size: int, workers: int):
        self.dp_world_size = dp_world_size
        self.dp_rank = dp_rank
        self.batch_size = batch_size
        self._rank_id = f"dp_rank_{dp_rank}"
        super().__init__(dataset, batch_size, num_workers=workers)

    def state_dict(self) -> dict[str, Any]:
        return {self._rank_id: pickle.dumps(super().state_dict()), "world_size": self.dp_world_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not state_dict:
            return
        if state_dict["world_size"] != self.dp_world_size:
            raise ValueError(f"the checkpoint is for {state_dict['world_size']} ranks, got {self.dp_world_size}")
        super().load_state_dict(pickle.loads(state_dict[self._rank_id]))


class Texts(IterableDataset, Stateful):
    """An endless stream of texts, packed into sequences of equal length. A buffer keeps leftover tokens."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.first, self.step = rank, ranks
        self.position = 0
        self.buffer: list[int] = []

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            random = torch.Generator().manual_seed(self.first + self.step * self.position)
            length = int(torch.randint(5, 40, (), generator=random))
            start = int(torch.randint(WORDS, (), generator=random))
            self.buffer += [(start + 3 * i) % WORDS for i in range(length)]
            self.position += 1
            while len(self.buffer) > LENGTH:
                tokens = torch.tensor(self.buffer[: LENGTH + 1])
                self.buffer = self.buffer[LENGTH + 1 :]
                yield tokens[:-1], tokens[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": self.buffer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position, self.buffer = state_dict["position"], state_dict["buffer"]


class Training(Stateful):
    """The state of the training, without the loader's state."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.net.load_state_dict(state_dict["net"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.step = state_dict["step"]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.exit(2, f"error: start this with torchrun: torchrun --nproc-per-node 2 {sys.argv[0]}\n")

    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    net = DistributedDataParallel(nn.Sequential(nn.Embedding(WORDS, 16), nn.Tanh(), nn.Linear(16, WORDS)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = ParallelAwareDataloader(Texts(rank, processes), rank, processes, batch_size=4, workers=options.workers)
    training = Training(net, optimizer)
    states = {"training": training, "dataloader": loader}
    checkpoint = newest(options.folder)
    if checkpoint is not None:
        dcp.load(states, checkpoint_id=checkpoint)

    steps = Steps(options.step_seconds, rank)
    batches = iter(loader)
    while training.step < 40:
        tokens, following = next(batches)
        loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        training.step += 1
        steps.show(training.step, f"loss {loss.item()}")
        if training.step % options.every == 0:
            folder = options.folder / f"step-{training.step}"
            dcp.save(states, checkpoint_id=folder.with_suffix(".new"))
            if rank == 0:
                os.rename(folder.with_suffix(".new"), folder)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
