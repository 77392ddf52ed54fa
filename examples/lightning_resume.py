"""Lightning: its checkpoints in mid-epoch hold the loader's state. Stop it at any moment and start it again.

python examples/lightning_resume.py --folder run
python examples/lightning_resume.py --folder run --devices 2      DDP over gloo
"""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_data import Points
from stoppable import EVERY, Steps, arguments, newest
from torch import nn

from rustloader import StatefulDataLoader


class Model(lightning.LightningModule):
    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        self.step_seconds = step_seconds
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))

    def train_dataloader(self) -> StatefulDataLoader:
        # Lightning's checkpoints do not hold torch's global random state. With a generator the loader's state does.
        generator = torch.Generator().manual_seed(7)
        return StatefulDataLoader(
            Points(512), batch_size=16, shuffle=True, generator=generator, num_workers=2, seed_by="sample"
        )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        points, above = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.net(points), above)
        Steps(self.step_seconds, self.global_rank).show(self.global_step + 1, f"loss {loss.item()}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--devices", type=int, default=1, help="processes")
    options = parser.parse_args()

    lightning.seed_everything(7, workers=True)
    checkpoints = ModelCheckpoint(
        options.folder, "step-{step}", every_n_train_steps=EVERY, save_top_k=-1, auto_insert_metric_name=False
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
    trainer.fit(Model(options.step_seconds), ckpt_path=newest(options.folder))


if __name__ == "__main__":
    main()
