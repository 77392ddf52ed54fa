"""The programs of docs/to-the-gpu.md for Lightning and accelerate, on the CPU."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "to-the-gpu.md").read_text()

HEAD = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples" / "frameworks")!r})
import torch
from small_data import Points
from torch import nn
import rustloader

torch.manual_seed(7)
# No random numbers from workers: Lightning creates more iterators of a DataLoader than of another iterable.
dataset, losses = list(Points(256)), []
model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

def loss_of(points, above):
    loss = nn.functional.binary_cross_entropy_with_logits(model(points), above)
    losses.append(loss.item())
    return loss
"""
# The code around the program of the page.
AROUND = {
    "Lightning": """
        import lightning
        {}

        class Trained(Module):
            def __init__(self):
                super().__init__()
                self.model = model
            def training_step(self, batch):
                return loss_of(*batch)
            def configure_optimizers(self):
                return optimizer

        quiet = {{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}}
        lightning.Trainer(accelerator="cpu", max_epochs=2, **quiet).fit(Trained())
    """,
    "accelerate": """
        import accelerate
        from torch.utils.data import DataLoader
        rustloader.install()
        loader = DataLoader(dataset, batch_size=64, num_workers=4)

        def train_step(points, above):
            loss = loss_of(points, above)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

        for epoch in range(2):
            {}
    """,
}
TAIL = """
print(*losses)
print(rustloader.engine_batches())
"""


def program(library):
    """The program of the page."""
    (code,) = re.findall(rf"```python\n# Needs {library}\.\n(.*?)```", PAGE, re.DOTALL)
    return code


def run(library, source):
    around = textwrap.dedent(AROUND[library])
    (indent,) = re.findall(r"(?m)^( *)\{\}$", around)
    text = HEAD + around.replace(indent + "{}", textwrap.indent(source, indent)).replace("{{", "{").replace("}}", "}")
    result = subprocess.run([sys.executable, "-c", text + TAIL], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    *_, losses, batches = result.stdout.splitlines()
    return losses.split(), int(batches)


@pytest.mark.parametrize("library", AROUND)
def test_the_program_of_the_page_trains_as_without_prefetching(library):
    source = program(library)
    without = re.sub(r"rustloader\.prefetch_to_device\(([\w.]+), [\w.]+\)", r"\1", source)
    assert without != source
    losses, batches = run(library, source)
    assert (losses, batches) == run(library, without) and len(losses) == batches == 8
