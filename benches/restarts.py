"""Measures the cost of the options for faults: `make compare KIND=restarts`. `KIND=reliability` measures faults.

equal   the batches of an epoch in which workers are killed 100 times, compared with those of an undisturbed epoch, with
        `seed_by="sample"`
NAME    a row of `make compare`: its batches per second with all options and without them, in turn; no worker dies and
        no sample fails. All rows run by default
"""

import logging
import mmap
import os
import signal
from pathlib import Path

import torch
import torch.utils.data
from epochs import loop
from harness.program import Program, main
from rows import BY_NAME

import rustloader
from rustloader.tools.harness.rounds import Failure, spread

OPTIONS = {"max_restarts": 1000, "stall_timeout": 60, "on_error": "skip", "max_errors": 1000}
BATCH, DEATHS = 4, 100
DOCS = Path(__file__).parent / "RESULTS.md"

program = Program(__doc__, ["equal", *BY_NAME], docs=(DOCS, "<!-- options -->"))


class Mortal(torch.utils.data.Dataset):
    """A dataset of random numbers. The first sample of each batch in `at` kills its worker when first fetched."""

    def __init__(self, length: int, at: range):
        self.length, self.at = length, at
        # A byte for each batch, shared by all processes.
        self.died = mmap.mmap(-1, length // BATCH)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        batch, place = divmod(index, BATCH)
        if place == 0 and batch in self.at and not self.died[batch]:
            self.died[batch] = 1
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.rand(8)


def batches_of(dataset: Mortal) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return list(rustloader.DataLoader(dataset, BATCH, num_workers=2, max_restarts=1000, seed_by="sample"))


def equal() -> None:
    """Compares the batches of an epoch in which workers die with those of an epoch without deaths."""
    length = BATCH * 10 * DEATHS
    killed = Mortal(length, range(5, 10 * DEATHS, 10))
    with_deaths, without_deaths = batches_of(killed), batches_of(Mortal(length, range(0)))
    if sum(killed.died[:]) != DEATHS or len(with_deaths) != len(without_deaths):
        raise Failure(
            f"{len(with_deaths)} batches instead of {len(without_deaths)}, after {sum(killed.died[:])} deaths"
        )
    differ = sum(not torch.equal(one, other) for one, other in zip(with_deaths, without_deaths, strict=True))
    what = f'batches that differ after {DEATHS} deaths, `seed_by="sample"`'
    program.line("equal", what, "0", f"{differ} of {len(with_deaths)}", held=differ == 0)


def measure(name: str) -> None:
    """Compares the rate of a row with all options and the rate without them."""
    logging.getLogger("rustloader").setLevel(logging.ERROR)
    if name == "equal":
        return equal()
    row, dataset = BY_NAME[name], BY_NAME[name].dataset()
    sides = {
        "with": loop(row, "rustloader", dataset, **OPTIONS),
        "without": loop(row, "rustloader", dataset),
    }
    rounds = program.interleave(sides, name)
    ratio = spread(rounds.ratios("without", "with", "wall"), "{:.3f}".format)
    held = rounds.ratio("without", "with", "wall") >= 0.97
    program.line(name, row.what, "at least 0.97", f"{ratio} of the rate without", held=held, rounds=rounds)


if __name__ == "__main__":
    main(program, measure, "what", "goal", "measured")
