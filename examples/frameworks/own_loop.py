"""Your own training loop over datasets, transforms or loaders of a library.

python examples/frameworks/own_loop.py torchvision
python examples/frameworks/own_loop.py timm --prefetcher --multi-epochs
python examples/frameworks/own_loop.py timm --no-install                      on torch's loader: the same losses
python -m rustloader run examples/frameworks/own_loop.py timm --no-install    on the engine: the command installs it
"""

import argparse
import functools
import importlib
import itertools
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from small_data import Points, arguments, write_images
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import rustloader


def train(loader: Iterable[Any], optimizer: torch.optim.Optimizer, loss_of: Callable[[Any], torch.Tensor]) -> str:
    """Trains on the batches of a loader. Returns the mean loss and the number of batches, as a string."""
    losses = []
    for batch in loader:
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return f"loss {torch.stack(losses).mean().item()} over {len(losses)} batches"


def small_net(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))


# --- torchvision: ImageFolder, v2 transforms in the workers, MixUp in the collate function ---------------------------


def mixed(mix: nn.Module, samples: list) -> tuple[torch.Tensor, torch.Tensor]:
    return mix(*default_collate(samples))


def torchvision(folder: Path, options: argparse.Namespace) -> None:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    augment = v2.Compose(
        [
            v2.ToImage(),  # a tv_tensors.Image
            v2.RandomResizedCrop(32, scale=(0.8, 1.0), antialias=True),
            v2.ColorJitter(brightness=0.3, contrast=0.3),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    plain = v2.Compose([v2.ToImage(), v2.Resize(32, antialias=True), v2.ToDtype(torch.float32, scale=True)])
    root = write_images(folder / "images")
    training = DataLoader(
        ImageFolder(root, augment),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        collate_fn=functools.partial(mixed, v2.MixUp(num_classes=4, alpha=0.2)),
        drop_last=True,
    )
    testing = DataLoader(ImageFolder(root, plain), batch_size=16, num_workers=2)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )
    net(torch.zeros(1, 3, 32, 32))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(net(images), labels)

    for epoch in range(2):
        trained = train(training, optimizer, loss_of)
        with torch.no_grad():
            test = torch.stack([loss_of(batch) for batch in testing])
        print(f"epoch {epoch}: {trained}, test {test.mean().item()}")


# --- timm: `create_dataset` on image files, `create_loader` with or without the prefetcher and the repeating loader ---


def timm(folder: Path, options: argparse.Namespace) -> None:
    import timm
    from timm.data import create_dataset, create_loader
    from timm.utils import random_seed

    random_seed(7)  # timm's prefetcher draws random numbers in this process, from Python's `random`
    net = timm.create_model("test_resnet", pretrained=False, num_classes=4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = create_loader(
        create_dataset("", root=str(write_images(folder / "images"))),
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
        trained = train(loader, optimizer, lambda batch: nn.functional.cross_entropy(net(batch[0]), batch[1]))
        print(f"epoch {epoch}: {trained}")


# --- datasets: Parquet files by index, then as a stream with a shuffle buffer, both `with_format("torch")` ------------


def datasets(folder: Path, options: argparse.Namespace) -> None:
    import datasets

    datasets.disable_progress_bars()
    random, files, cache = torch.Generator().manual_seed(7), [], str(folder / "cache")
    for shard in range(4):
        x = torch.rand(64, 8, generator=random)
        rows = datasets.Dataset.from_dict({"x": x.tolist(), "y": x.sum(1).tolist()})
        files.append(str(folder / f"part-{shard}.parquet"))
        rows.to_parquet(files[-1])

    rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache).with_format("torch")
    stream = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache, streaming=True)
    stream = stream.with_format("torch").shuffle(seed=7, buffer_size=32)
    net = small_net(8)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def loss_of(batch: dict) -> torch.Tensor:
        return nn.functional.mse_loss(net(batch["x"]), batch["y"])

    by_index = DataLoader(rows, batch_size=16, shuffle=True, num_workers=2)
    for epoch in range(2):
        print(f"by index: epoch {epoch}: {train(by_index, optimizer, loss_of)}")
    streamed = DataLoader(stream, batch_size=16, num_workers=2, persistent_workers=True)
    for epoch in range(2):
        stream.set_epoch(epoch)  # changes the order; persistent workers read the epoch from shared memory
        print(f"stream: epoch {epoch}: {train(streamed, optimizer, loss_of)}")


# --- PyTorch Geometric: graphs of different sizes with random features, batched by its DataLoader ---------------------


class Rings(Dataset):
    """Rings of 4 to 11 nodes with random features; the class says whether a ring has more than 7 nodes."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        from torch_geometric.data import Data

        size = 4 + i % 8
        nodes = torch.arange(size)
        edges = torch.stack([nodes, (nodes + 1) % size])
        x = torch.randn(size, 4) + size / 8
        return Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], dim=1), y=torch.tensor([int(size > 7)]))


def torch_geometric(folder: Path, options: argparse.Namespace) -> None:
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GCNConv, Sequential, global_mean_pool

    net = Sequential(
        "x, edges, graph",
        [
            (GCNConv(4, 16), "x, edges -> x"),
            nn.ReLU(),
            (GCNConv(16, 16), "x, edges -> x"),
            nn.ReLU(),
            (global_mean_pool, "x, graph -> x"),
            nn.Linear(16, 2),
        ],
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    loader = DataLoader(Rings(128), batch_size=16, shuffle=True, num_workers=2)

    def loss_of(graphs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(net(graphs.x, graphs.edge_index, graphs.batch), graphs.y)

    for epoch in range(2):
        print(f"epoch {epoch}: {train(loader, optimizer, loss_of)}")


# --- webdataset: local tar shards, decoded and batched in the workers, through WebLoader ------------------------------


def webdataset(folder: Path, options: argparse.Namespace) -> None:
    import numpy as np
    import webdataset as wds

    random, shards = np.random.default_rng(7), [str(folder / f"part-{shard}.tar") for shard in range(4)]
    for shard, name in enumerate(shards):
        with wds.TarWriter(name) as tar:
            for number in range(32):
                label = number % 4
                pixels = random.integers(0, 128, (16, 16, 3), dtype=np.uint8)
                pixels[4 * label : 4 * label + 4] += 100
                tar.write({"__key__": f"{shard}-{number:03d}", "png": pixels, "cls": label})

    # detshuffle gives the same order in each run; shuffle() is seeded with the time and the process ID.
    dataset = (
        wds.WebDataset(shards, shardshuffle=4, detshuffle=True, seed=7)
        .compose(wds.detshuffle(32, seed=7))
        .decode("torchrgb")
        .to_tuple("png", "cls")
        .batched(8)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)

    def loss_of(batch: list) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(net(images), torch.as_tensor(labels))

    for epoch in range(2):
        print(f"epoch {epoch}: {train(loader, optimizer, loss_of)}")


# --- ultralytics: a YOLO net on its dataset with mosaics, through its InfiniteDataLoader ------------------------------


def ultralytics(folder: Path, options: argparse.Namespace) -> None:
    from ultralytics.cfg import get_cfg
    from ultralytics.data.build import build_dataloader, build_yolo_dataset
    from ultralytics.nn.tasks import DetectionModel
    from ultralytics.utils.torch_utils import init_seeds

    init_seeds(7, deterministic=True)
    images = write_images(folder / "images", each=8)
    for image in sorted(images.glob("*/*.png")):  # a box around the bright square of each image
        label = int(image.parent.name)
        x, y = 0.25 + 0.5 * (label % 2), 0.25 + 0.5 * (label // 2)
        target = folder / "labels" / image.parent.name / f"{image.stem}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{label} {x} {y} 0.5 0.5\n")

    settings = get_cfg(overrides={"task": "detect", "imgsz": 64, "cache": False, "mosaic": 1.0})
    data = {"names": dict(enumerate("abcd")), "nc": 4, "channels": 3}
    net = DetectionModel("yolo11n.yaml", nc=4, verbose=False)
    net.args = settings
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    dataset = build_yolo_dataset(settings, str(images), batch=8, data=data, stride=32)
    loader = build_dataloader(dataset, batch=8, workers=2, shuffle=True)

    def loss_of(batch: dict) -> torch.Tensor:
        return net({**batch, "img": batch["img"].float() / 255})[0].sum()

    for epoch in range(2):
        print(f"epoch {epoch}: {train(loader, optimizer, loss_of)} of {type(loader).__name__}")


# --- torchdata: its StatefulDataLoader keeps its own workers and state, while another loader runs on the engine -------


def torchdata(folder: Path, options: argparse.Namespace) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    net = small_net(2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    testing = DataLoader(Points(64), batch_size=16, num_workers=2)

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        points, above = batch
        return nn.functional.binary_cross_entropy_with_logits(net(points), above)

    for epoch in range(2):
        # Each epoch is cut short, and a new loader resumes it, as after a checkpoint.
        state = None
        for part in (0, 1):
            training = StatefulDataLoader(Points(256), batch_size=16, num_workers=2)
            if state is not None:
                training.load_state_dict(state)
            batches = iter(training)
            trained = train(itertools.islice(batches, 6 if part == 0 else None), optimizer, loss_of)
            state = training.state_dict()
            print(f"epoch {epoch}, part {part}: {trained} by {type(batches).__module__}.{type(batches).__qualname__}")
        with torch.no_grad():
            test = torch.stack([loss_of(batch) for batch in testing])
        print(f"epoch {epoch}: test {test.mean().item()}")


# For each library: its example, and the module to import before `install()`, as a program usually does.
LIBRARIES: dict[str, tuple[Callable[[Path, argparse.Namespace], None], str]] = {
    "torchvision": (torchvision, "torchvision"),
    "timm": (timm, "timm.data"),
    "datasets": (datasets, "datasets"),
    "torch-geometric": (torch_geometric, "torch_geometric.loader"),
    "webdataset": (webdataset, "webdataset"),
    "ultralytics": (ultralytics, "ultralytics.data.build"),
    "torchdata": (torchdata, "torchdata.stateful_dataloader"),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--prefetcher", action="store_true", help="timm: use the prefetcher, which converts to float")
    parser.add_argument("--multi-epochs", action="store_true", help="timm: use the loader whose sampler never ends")
    options = parser.parse_args()
    run, module = LIBRARIES[options.library]
    try:
        importlib.import_module(module)
    except ImportError as error:
        parser.exit(1, f"error: this needs {options.library}: pip install {options.library} ({error})\n")
    if options.install:
        rustloader.install()

    torch.manual_seed(7)
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), options)
        print(f"process 0: {rustloader.engine_batches()} batches from the engine")


if __name__ == "__main__":
    main()
