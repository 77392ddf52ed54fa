"""accelerate: `use_stateful_dataloader`, `save_state` and `load_state` in mid-epoch. Stop it and run it again.

python examples/resuming/accelerate_resume.py --folder run
torchrun --nproc-per-node 2 examples/resuming/accelerate_resume.py --folder run
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from stoppable import Points, Steps, arguments, newest
from torch import nn
from torch.utils.data import DataLoader

import rustloader


class Progress:
    """The progress of the training, which `save_state` also saves."""

    def __init__(self) -> None:
        self.epoch = 0
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def main() -> None:
    options = arguments(__doc__).parse_args()
    # When accelerate imports torchdata's StatefulDataLoader, it now gets rustloader's.
    rustloader.install(stateful=True, seed_by="sample")

    # With several processes, accelerate's default sampler has a generator that no checkpoint contains.
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(7)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    loader = DataLoader(Points(512), batch_size=32 // accelerator.num_processes, shuffle=True, num_workers=2)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    checkpoint = newest(options.folder)
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))

    steps = Steps(options.step_seconds, accelerator.process_index)
    for epoch in range(progress.epoch, 3):
        progress.epoch = epoch
        loader.set_epoch(epoch)
        for points, above in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(net(points), above)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            progress.step += 1
            steps.show(progress.step, f"loss {loss.item()}")
            if progress.step % options.every == 0:
                folder = options.folder / f"step-{progress.step}"
                accelerator.save_state(str(folder.with_suffix(".new")))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    os.rename(folder.with_suffix(".new"), folder)
    accelerator.end_training()


if __name__ == "__main__":
    main()
