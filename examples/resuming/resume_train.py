"""A training run that can be stopped at any moment, by Ctrl-C or SIGKILL, and continues when it is run again.

python examples/resuming/resume_train.py --folder run     stop it and run it again: the same losses as without the stop
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from stoppable import Points, Steps, arguments
from torch import nn

from rustloader import StatefulDataLoader


def train(
    net: nn.Module,
    loader: StatefulDataLoader,
    loss_of: Callable[[Any], torch.Tensor],
    options: argparse.Namespace,
    set_epoch: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Trains for three epochs. Continues from the checkpoint in `options.folder`, if there is one."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    checkpoint = options.folder / "checkpoint.pt"
    first_epoch, step = 0, 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        torch.set_rng_state(saved["random"])
        first_epoch, step = saved["epoch"], saved["step"]

    steps = Steps(options.step_seconds)
    for epoch in range(first_epoch, 3):
        set_epoch(epoch)
        for batch in loader:
            loss = loss_of(batch)
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
                options.folder.mkdir(parents=True, exist_ok=True)
                # The old checkpoint is kept until the new one is complete.
                torch.save(saved, checkpoint.with_suffix(".new"))
                os.replace(checkpoint.with_suffix(".new"), checkpoint)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--workers", type=int, default=2, help="may change from run to run (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
    # With seed_by="sample", the random numbers of a sample do not depend on its worker, so a resumed epoch draws the
    # same numbers with any number of workers.
    loader = StatefulDataLoader(Points(256), batch_size=16, shuffle=True, num_workers=options.workers, seed_by="sample")

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        points, above = batch
        return nn.functional.binary_cross_entropy_with_logits(net(points), above)

    train(net, loader, loss_of, options)


if __name__ == "__main__":
    main()
