"""accelerate: packs without padding, dealt to the ranks by the sampler. The loader is not passed to `prepare`.

accelerate launch --cpu --num_processes 2 examples/sequences/accelerate_packs.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from texts import Model, Texts

from rustloader import PackingBatchSampler, StatefulDataLoader, pack


def main() -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(7)
    dataset, net = Texts(500), Model()
    net, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
    # The ranks are those of the process group, which the Accelerator has created.
    sampler = PackingBatchSampler(dataset.lengths, capacity=512, window=100)
    loader = StatefulDataLoader(dataset, batch_sampler=sampler, collate_fn=pack, num_workers=2)

    sequences = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            sequences += len(batch["cu_seqlens"]) - 1
            batch = send_to_device(batch, accelerator.device)
            loss = net(batch["input_ids"], batch["labels"])
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f} after {len(loader)} batches of each rank")
    print(f"process {accelerator.process_index}: {sequences} sequences", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
