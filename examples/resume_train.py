"""A training that may be stopped at any moment, by Ctrl-C or SIGKILL: started again, it goes on exactly there.

python examples/resume_train.py --folder run     stop it, start it again: the same losses as without the stop
"""

import argparse
import os
import time
from pathlib import Path

import torch
from small_data import Points
from torch import nn

from rustloader import StatefulDataLoader


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="may change from run to run (default: %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0, help="a longer step leaves time to stop in")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    # Random numbers that depend on the sample alone: a resumed epoch draws the same, with any number of workers.
    loader = StatefulDataLoader(Points(256), batch_size=16, shuffle=True, num_workers=options.workers, seed_by="sample")

    checkpoint = options.folder / "checkpoint.pt"
    first_epoch, step = 0, 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        torch.set_rng_state(saved["random"])
        first_epoch, step = saved["epoch"], saved["step"]

    for epoch in range(first_epoch, options.epochs):
        for points, above in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(net(points), above)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            print(f"rank 0 step {step}: loss {loss.item()}", flush=True)
            time.sleep(options.step_seconds)
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
                # The old checkpoint stays until the new one is whole.
                torch.save(saved, checkpoint.with_suffix(".new"))
                os.replace(checkpoint.with_suffix(".new"), checkpoint)


if __name__ == "__main__":
    main()
