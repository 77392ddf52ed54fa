"""ultralytics: a YOLO net trained on small images through ultralytics' dataset and its InfiniteDataLoader.

python examples/ultralytics_yolo.py
python examples/ultralytics_yolo.py --no-install                      on torch's loader: the same losses
python -m rustloader run examples/ultralytics_yolo.py --no-install    on the engine, switched from outside
"""

import argparse
import tempfile
from pathlib import Path

import torch
from small_data import write_images
from ultralytics.cfg import get_cfg
from ultralytics.data.build import build_dataloader, build_yolo_dataset
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils.torch_utils import init_seeds

import rustloader


def write_labels(images: Path, labels: Path) -> None:
    """A box for the bright square of each image."""
    for image in sorted(images.glob("*/*.png")):
        label = int(image.parent.name)
        x, y = 0.25 + 0.5 * (label % 2), 0.25 + 0.5 * (label // 2)
        target = labels / image.parent.name / f"{image.stem}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{label} {x} {y} 0.5 0.5\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-install", dest="install", action="store_false", help="leave torch's loader in place")
    options = parser.parse_args()
    if options.install:
        rustloader.install()

    init_seeds(7, deterministic=True)
    settings = get_cfg(overrides={"task": "detect", "imgsz": 64, "cache": False, "mosaic": 1.0})
    data = {"names": dict(enumerate("abcd")), "nc": 4, "channels": 3}
    net = DetectionModel("yolo11n.yaml", nc=4, verbose=False)
    net.args = settings
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        images = write_images(Path(folder) / "images", each=8)
        write_labels(images, Path(folder) / "labels")
        dataset = build_yolo_dataset(settings, str(images), batch=8, data=data, stride=32)
        loader = build_dataloader(dataset, batch=8, workers=2, shuffle=True)
        for epoch in range(2):
            losses = []
            for batch in loader:
                batch["img"] = batch["img"].float() / 255
                loss = net(batch)[0].sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            print(f"epoch {epoch}: loss {torch.stack(losses).mean().item()} over {len(losses)} batches")
        kind = type(loader).__name__
    print(f"process 0: {rustloader.engine_batches()} batches from the engine through {kind}")


if __name__ == "__main__":
    main()
