"""torchdata: its StatefulDataLoader keeps its own workers and its state, beside a torch loader on the engine.

python examples/torchdata_stateful.py
python examples/torchdata_stateful.py --no-install                      on torch's loader: the same losses
python -m rustloader run examples/torchdata_stateful.py --no-install    on the engine, switched from outside
"""

import argparse

import torch
from small_data import Points
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import rustloader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-install", dest="install", action="store_false", help="leave torch's loader in place")
    options = parser.parse_args()
    if options.install:
        rustloader.install()

    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    testing = DataLoader(Points(64), batch_size=16, num_workers=2)
    state = None
    for epoch in range(2):
        # Each epoch ends early, and a new loader resumes it, as after a checkpoint.
        for part in (0, 1):
            training = StatefulDataLoader(Points(256), batch_size=16, num_workers=2)
            if part == 1:
                training.load_state_dict(state)
            losses = []
            batches = iter(training)
            for points, above in batches:
                loss = nn.functional.binary_cross_entropy_with_logits(net(points), above)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
                if part == 0 and len(losses) == 6:
                    state = training.state_dict()
                    break
            kind = f"{type(batches).__module__}.{type(batches).__qualname__}"
            print(f"epoch {epoch}, part {part}: loss {torch.stack(losses).mean().item()} by {kind}")
        with torch.no_grad():
            test = [nn.functional.binary_cross_entropy_with_logits(net(points), above) for points, above in testing]
        print(f"epoch {epoch}: test {torch.stack(test).mean().item()}")
    print(f"process 0: {rustloader.engine_batches()} batches from the engine")


if __name__ == "__main__":
    main()
