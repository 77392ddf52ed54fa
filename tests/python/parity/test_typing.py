"""Type checkers report the same for our class as for torch's."""

import re
import subprocess
import sys
import uuid

import pytest
from support import ROOT

pytest.importorskip("mypy", reason="mypy is not installed")
pytestmark = [pytest.mark.ours, pytest.mark.timeout(600)]


# Lines marked `error` must be errors, and the others must not.
SNIPPET = """
import torch
from {module} import DataLoader, Dataset, IterableDataset, default_collate, random_split
from torch.utils.data import DataLoader as TorchDataLoader

class Pairs(Dataset[tuple[torch.Tensor, int]]):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(1), index

class Stream(IterableDataset[str]):
    pass

class Mine(DataLoader[int]):
    pass

loader = DataLoader(Pairs(), batch_size=4, num_workers=2, prefetch_factor=None, in_order=False)
given: DataLoader[tuple[torch.Tensor, int]] = DataLoader(Pairs(), shuffle=True, collate_fn=default_collate)
reveal_type(loader)
reveal_type(given)
reveal_type(DataLoader(Stream()))  # error
reveal_type(DataLoader(["a", "b"]))  # error
reveal_type(Mine)
reveal_type(loader.dataset)
reveal_type(loader.batch_size)
reveal_type(loader.num_workers)
reveal_type(loader.sampler)
reveal_type(loader.timeout)
reveal_type(loader.prefetch_factor)
reveal_type(loader.multiprocessing_context)
reveal_type(loader._iterator)
reveal_type(loader._get_iterator())
reveal_type(iter(loader))
reveal_type(len(loader))
reveal_type(next(iter(loader)))
reveal_type(DataLoader.__init__)
reveal_type(random_split(Pairs(), [1, 2]))
for batch in loader:
    reveal_type(batch)

def wants_torchs(loader: TorchDataLoader[object]) -> None: ...
def wants_numbers(loader: DataLoader[int]) -> None: ...

wants_torchs(loader)
wants_numbers(Mine(range(3)))  # error
wants_numbers(loader)  # error
DataLoader(Pairs(), batch_size="4")  # error
DataLoader(Pairs(), nonsense=1)  # error
DataLoader(Pairs(), 1, True, None, None, 0, None, False, False, 0, None, None, None, 2)  # error
DataLoader()  # error
loader.nonsense  # error
loader.num_workers = "two"  # error
"""


def test_mypy_reveals_the_same_types_and_the_same_errors(tmp_path):
    files = {"torch.utils.data": tmp_path / "with_torch.py", "rustloader": tmp_path / "with_ours.py"}
    for module, file in files.items():
        # mypy does not repeat what it reported for a cached file.
        file.write_text(f"{SNIPPET.format(module=module)}# {uuid.uuid4()}\n")
    # This uses the cache of `make lint`, if there is one: mypy takes a while to read torch.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--no-pretty", "--no-error-summary"]
        + [str(file) for file in files.values()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    reports = {}
    for module, file in files.items():
        lines = [line.split(":", 1)[1] for line in done.stdout.splitlines() if line.startswith(str(file))]
        names = {file.stem: "snippet", "rustloader.dataloader": "torch.utils.data.dataloader"}
        reports[module] = [re.sub("|".join(names), lambda name: names[name[0]], line) for line in lines]  # noqa: B023
    assert reports["rustloader"] == reports["torch.utils.data"], done.stdout
    report = reports["rustloader"]
    assert len([line for line in report if "Revealed type" in line]) == SNIPPET.count("reveal_type(")
    wrong = {n for n, line in enumerate(SNIPPET.splitlines(), 1) if line.endswith("# error")}
    assert {int(re.match(r"\d+", line)[0]) for line in report if " error:" in line} == wrong, done.stdout
    assert 'Revealed type is "torch.utils.data.dataloader.DataLoader[tuple[torch._tensor.Tensor, int]]"' in done.stdout


OPTIONS = """
import rustloader
reveal_type(rustloader.install)
rustloader.install(prefetch_factor=3)
with rustloader.installed(in_order=True, multiprocessing_context="fork"):
    pass
rustloader.install(prefetch_factor="3")  # error
rustloader.installed(nonsense=1)  # error
rustloader.install(True)  # error
rustloader.Options(in_order=2.5)  # error
"""


def test_mypy_knows_the_options(tmp_path):
    """The options are declared in one place, and mypy must find them in the functions that take them."""
    file = tmp_path / "options.py"
    file.write_text(f"{OPTIONS}# {uuid.uuid4()}\n")
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--no-pretty", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    wrong = {n for n, line in enumerate(OPTIONS.splitlines(), 1) if line.endswith("# error")}
    assert {int(n) for n in re.findall(r":(\d+): error:", done.stdout)} == wrong, done.stdout + done.stderr
    assert 'Revealed type is "def (*, in_order: bool | None =, prefetch_factor: int | None =, ' in done.stdout
