"""`rustloader.stats()` and `report()` of the loaders that libraries wrap around others."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
# Each program defines a `loader` with two workers and 16 batches per epoch. The engine serves one epoch.
PROGRAMS = {
    "accelerate": """
        from accelerate import Accelerator
        loader = Accelerator(cpu=True).prepare(DataLoader(Points(64), batch_size=4, num_workers=2))
    """,
    "accelerate, split batches": """
        from accelerate import Accelerator, DataLoaderConfiguration
        config = DataLoaderConfiguration(split_batches=True, dispatch_batches=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        loader = accelerator.prepare(DataLoader(Points(64), batch_size=4, num_workers=2))
    """,
    "accelerate, skipped batches": """
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(Points(128), batch_size=4, num_workers=2))
        loader = accelerator.skip_first_batches(loader, 16)
    """,
    "Fabric": """
        from lightning.fabric import Fabric
        loader = Fabric(accelerator="cpu").setup_dataloaders(DataLoader(Points(64), batch_size=4, num_workers=2))
    """,
    "timm": """
        from timm.data.loader import PrefetchLoader
        class Images(Points):
            def __getitem__(self, index):
                return torch.zeros(3, 8, 8, dtype=torch.uint8), 0
        inner = DataLoader(Images(64), batch_size=4, num_workers=2)
        loader = PrefetchLoader(inner, device=torch.device("cpu"))
    """,
    "fastai": """
        from fastai.data.load import DataLoader as FastaisLoader
        loader = FastaisLoader(Points(64), bs=4, num_workers=2, device="cpu")
    """,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_figures_of_what_a_library_has_wrapped(name):
    source = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import torch
from small_data import Points
from torch.utils.data import DataLoader
import rustloader
rustloader.install()
{textwrap.dedent(PROGRAMS[name])}
told = []
count = sum(1 for _ in loader)
with rustloader.report(loader, told.append):
    pass
for stats in (rustloader.stats(loader), *told):
    assert count == stats.batches == 16 == rustloader.engine_batches(), (count, stats)
    assert stats.num_workers == len(stats.workers) == 2 and stats.iterators == 1 and not stats.note, stats
    assert stats.step_seconds + stats.next_seconds > 0 and sum(worker.tasks for worker in stats.workers) == 16
"""
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
