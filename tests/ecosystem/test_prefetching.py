"""accelerate's loaders over `prefetch_to_device`, on a device without hardware."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(300)]

LIB = Path(__file__).parents[1] / "lib"
PROGRAM = f"""
import sys
sys.path.insert(0, {str(LIB)!r})
import accelerate, torch, rustloader, rustloader.device.prefetch.loader
from sample_data import Numbers
from standin import StandIn
rustloader.install()
accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
device = StandIn()
rustloader.device.prefetch.loader.streams_of = lambda asked: device


def prepared(loader):
    loader = accelerator.prepare(loader)
    loader.base_dataloader = rustloader.prefetch_to_device(loader.base_dataloader, accelerator.device)
    return loader
"""


def run(body):
    result = subprocess.run([sys.executable, "-c", PROGRAM + body], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr


def test_accelerate_knows_the_last_batch():
    run("""
model, optimizer = accelerator.prepare(model, optimizer)
loader = prepared(torch.utils.data.DataLoader(Numbers(22), batch_size=4, num_workers=1))
for epoch in range(2):
    syncs, sizes = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            syncs.append(accelerator.sync_gradients)
            sizes.append(len(accelerator.gather_for_metrics(batch)))
    # After 4 batches, and at the end.
    assert syncs == [False, False, False, True, False, True], syncs
    assert sizes == [4, 4, 4, 4, 4, 2], sizes
device.run_all()
assert device.copies == rustloader.engine_batches() == 12 and device.faults == []
""")


def test_accelerate_saves_the_place_of_the_batch_in_the_loop():
    run("""
def stateful():
    loader = accelerator.prepare(torch.utils.data.DataLoader(Numbers(22), batch_size=4))
    inner = rustloader.StatefulDataLoader(Numbers(22), batch_size=4, num_workers=1)
    loader.base_dataloader = rustloader.prefetch_to_device(inner, accelerator.device)
    return loader

for taken in range(1, 6):
    loader = stateful()
    for _, batch in zip(range(taken), loader):
        state = loader.state_dict()
    resumed, got = stateful(), []
    resumed.load_state_dict(state)
    for batch in resumed:
        device.read(batch, got.extend)
    device.run_all()
    assert got == list(range(4 * taken, 22)), (taken, got)
assert device.faults == []
""")
