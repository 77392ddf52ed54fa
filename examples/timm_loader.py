"""timm: `create_dataset` on image files, `create_loader` with its prefetcher, its repeating loader or neither.

python examples/timm_loader.py
python examples/timm_loader.py --prefetcher --multi-epochs
python examples/timm_loader.py --no-install                      on torch's loader: the same losses
python -m rustloader run examples/timm_loader.py --no-install    on the engine, switched from outside
"""

import argparse
import tempfile
from pathlib import Path

import timm
import torch
from small_data import write_images
from timm.data import create_dataset, create_loader
from timm.utils import random_seed

import rustloader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefetcher", action="store_true", help="bytes from the workers, floats by timm's prefetcher")
    parser.add_argument("--multi-epochs", action="store_true", help="timm's loader whose sampler never ends")
    parser.add_argument("--no-install", dest="install", action="store_false", help="leave torch's loader in place")
    options = parser.parse_args()
    if options.install:
        rustloader.install()

    random_seed(7)
    net = timm.create_model("test_resnet", pretrained=False, num_classes=4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        dataset = create_dataset("", root=str(write_images(Path(folder) / "images")))
        loader = create_loader(
            dataset,
            input_size=(3, 32, 32),
            batch_size=8,
            is_training=True,
            auto_augment="rand-m5-n1",
            re_prob=0.2,
            num_workers=2,
            device=torch.device("cpu"),
            use_prefetcher=options.prefetcher,
            use_multi_epochs_loader=options.multi_epochs,
        )
        for epoch in range(2):
            losses = []
            for images, labels in loader:
                loss = torch.nn.functional.cross_entropy(net(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            print(f"epoch {epoch}: loss {torch.stack(losses).mean().item()} over {len(losses)} batches")
    print(f"process 0: {rustloader.engine_batches()} batches from the engine")


if __name__ == "__main__":
    main()
