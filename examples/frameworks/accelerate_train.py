"""accelerate: `prepare` rebuilds the loader; the second epoch resumes halfway with `skip_first_batches`.

accelerate launch --cpu --num_processes 2 examples/frameworks/accelerate_train.py
accelerate launch --cpu --num_processes 2 -m rustloader run examples/frameworks/accelerate_train.py --no-install
python examples/frameworks/accelerate_train.py --no-install     on torch's loader: the same losses
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from small_data import Points, arguments
from torch import nn
from torch.utils.data import DataLoader

import rustloader


def main() -> None:
    options = arguments(__doc__).parse_args()
    if options.install:
        rustloader.install()

    accelerator = Accelerator(cpu=True)
    set_seed(7)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    loader = DataLoader(Points(256), batch_size=16, shuffle=True, num_workers=2)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)

    for epoch in range(2):
        # The second epoch skips the first half of its batches, as if the run resumed from a checkpoint there.
        remaining = loader if epoch == 0 else accelerator.skip_first_batches(loader, len(loader) // 2)
        losses = []
        for points, above in remaining:
            loss = nn.functional.binary_cross_entropy_with_logits(net(points), above)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.gather(loss.detach()).mean())
        accelerator.print(f"epoch {epoch}: loss {torch.stack(losses).mean().item()} over {len(losses)} batches")
    print(f"process {accelerator.process_index}: {rustloader.engine_batches()} batches from the engine", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
