"""fastai: ImageDataLoaders on image files, a Learner with a small net.

fastai's own DataLoader creates torch's iterator, which `rustloader.install()` replaces.

python examples/frameworks/fastai_learner.py
python examples/frameworks/fastai_learner.py --no-install                      on torch's loader: the same losses
python -m rustloader run examples/frameworks/fastai_learner.py --no-install    on the engine: the command installs it
"""

import tempfile
from pathlib import Path

from fastai.vision.all import (
    CrossEntropyLossFlat,
    ImageDataLoaders,
    Learner,
    Resize,
    SimpleCNN,
    accuracy,
    aug_transforms,
    set_seed,
)
from small_data import arguments, write_images

import rustloader


def main() -> None:
    options = arguments(__doc__).parse_args()
    if options.install:
        rustloader.install()

    set_seed(7, reproducible=True)
    with tempfile.TemporaryDirectory() as folder:
        loaders = ImageDataLoaders.from_folder(
            write_images(Path(folder) / "images"),
            valid_pct=0.25,
            seed=7,
            item_tfms=Resize(32),
            batch_tfms=aug_transforms(),
            bs=8,
            num_workers=2,
            device="cpu",
        )
        learner = Learner(loaders, SimpleCNN([3, 8, 16, 4]), CrossEntropyLossFlat(), metrics=accuracy)
        with learner.no_bar(), learner.no_logging():
            learner.fit(2, lr=1e-2)
        for epoch, (train, valid, right) in enumerate(learner.recorder.values):
            print(f"epoch {epoch}: loss {train}, validation {valid}, accuracy {right}")
    print(f"process 0: {rustloader.engine_batches()} batches from the engine")


if __name__ == "__main__":
    main()
