"""Lightning: checkpoints in mid-epoch contain the loader's state. Stop it at any moment and run it again.

python examples/resuming/lightning_resume.py --folder run
python examples/resuming/lightning_resume.py --folder run --devices 2      DDP over gloo
python examples/resuming/lightning_resume.py --folder run --stream         an iterable dataset without a length
"""

from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from stoppable import Points, Steps, arguments, newest
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from rustloader import StatefulDataLoader


class Stream(IterableDataset):
    """A stream of points, without a length. Each worker reads a part of the points; the state is the position in it."""

    def __init__(self, n: int) -> None:
        self.points = Points(n)
        self.position = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        mine = range(worker.id, len(self.points), worker.num_workers)
        while self.position < len(mine):
            self.position += 1
            yield self.points[mine[self.position - 1]]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class OneBehind(StatefulDataLoader):
    """A loader without a length. Lightning fetches one batch ahead of training from such a loader.

    The state therefore leaves out the fetched batch, so that a resumed run does not lose it.
    """

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        state = super().state_dict()
        return state if state["_iterator_finished"] else super().state_dict(back=1)


class Model(lightning.LightningModule):
    def __init__(self, step_seconds: float, stream: bool) -> None:
        super().__init__()
        self.step_seconds = step_seconds
        self.stream = stream
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))

    def train_dataloader(self) -> StatefulDataLoader:
        # Lightning's checkpoints do not contain torch's global random state. The loader therefore has a generator,
        # whose state is part of the loader's state.
        settings = {"num_workers": 2, "generator": torch.Generator().manual_seed(7), "seed_by": "sample"}
        if self.stream:
            return OneBehind(Stream(512), batch_size=16, **settings)
        return StatefulDataLoader(Points(512), batch_size=16, shuffle=True, **settings)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        points, above = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.net(points), above)
        Steps(self.step_seconds, self.global_rank).show(self.global_step + 1, f"loss {loss.item()}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--devices", type=int, default=1, help="number of processes")
    parser.add_argument("--stream", action="store_true", help="use an IterableDataset")
    options = parser.parse_args()

    lightning.seed_everything(7, workers=True)
    checkpoints = ModelCheckpoint(
        options.folder, "step-{step}", every_n_train_steps=options.every, save_top_k=-1, auto_insert_metric_name=False
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        max_epochs=3,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(options.step_seconds, options.stream), ckpt_path=newest(options.folder))


if __name__ == "__main__":
    main()
