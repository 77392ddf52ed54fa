"""ignite: a trainer and an evaluator on loaders that `auto_dataloader` rebuilds.

python examples/frameworks/ignite_engine.py
python examples/frameworks/ignite_engine.py --no-install                      on torch's loader: the same losses
python -m rustloader run examples/frameworks/ignite_engine.py --no-install    on the engine: the command installs it
"""

import ignite.distributed as idist
import torch
from ignite.engine import DeterministicEngine, Engine, Events, create_supervised_evaluator
from ignite.metrics import Loss
from ignite.utils import manual_seed
from small_data import Points, arguments
from torch import nn

import rustloader


def main() -> None:
    options = arguments(__doc__).parse_args()
    if options.install:
        rustloader.install()

    manual_seed(7)
    net = idist.auto_model(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0)))
    optimizer = idist.auto_optim(torch.optim.Adam(net.parameters(), lr=0.01))
    criterion = nn.BCEWithLogitsLoss()
    training = idist.auto_dataloader(Points(256), batch_size=16, shuffle=True, num_workers=2)
    testing = idist.auto_dataloader(Points(64), batch_size=16, num_workers=2)

    def step(engine: Engine, batch: list[torch.Tensor]) -> float:
        points, above = batch
        loss = criterion(net(points), above)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = DeterministicEngine(step)  # its sampler makes each epoch resumable
    evaluator = create_supervised_evaluator(net, metrics={"loss": Loss(criterion)})

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        loss = evaluator.run(testing).metrics["loss"]
        print(f"epoch {engine.state.epoch}: last loss {engine.state.output}, test {loss}")

    trainer.run(training, max_epochs=2)
    print(f"process 0: {rustloader.engine_batches()} batches from the engine")


if __name__ == "__main__":
    main()
