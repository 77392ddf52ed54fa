"""Measures the gain of rustloader on this machine, in about a minute.

Part 1, the gain: five kinds of batches through torch's DataLoader without workers, with workers, and through
rustloader. Part 2, the proof: a net trained on image files through both loaders; the losses must agree to the
last bit. The demo also draws a picture of the gains, and of rustloader at work.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import warnings
from pathlib import Path

import torch

from demo import proof, text
from demo.measure import Failure, Result, measure, record
from demo.settings import Settings
from demo.workloads import WORKLOADS, write_files
from rustloader.tools.cli.parser import positive_int, positive_seconds, seconds
from rustloader.tools.harness.machine import machine
from rustloader.tools.harness.progress import Progress

__all__ = ["main"]

EXAMPLES = """\
examples:
  make demo                                                 the whole demo
  make demo ARGS='--workers 4'                              4 workers per loader
  make demo ARGS='--markdown --plot docs/demo.png'          also print the table of README.md

The exit status is 0 only if both loaders delivered equal batches, the losses were the same to the last bit, and the
Rust engine delivered all batches of rustloader. Image files (about 48 MB) stay in examples/start/data for the next run.
"""
PICTURED = next(workload for workload in WORKLOADS if workload.name == "Cached images")
FORMATS = (".png", ".svg", ".pdf")


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo, and returns the exit status."""
    settings = parse(arguments)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
    # One thread, as in a worker. With more, torch without workers is very slow while other programs use the cores.
    torch.set_num_threads(1)
    about = machine()
    print(
        "rustloader {rustloader}, torch {torch}, Python {python}, on {cores} cores of {cpu}.".format(**about),
        f"This takes about {estimate(settings):.0f} s.",
    )
    write_files(settings.data)
    results, failures = gain(settings)
    if results and not failures:
        draw(results, settings)
    print("\nPart 2, the proof: a net trained on PNG files through each loader")
    for promise in proof.PROMISES:
        failures += promise(settings)
    print()
    for line in text.conclusion(results):
        print(line)
    for failure in failures:
        print(f"FAILED: {failure}")
    if settings.markdown and not failures:
        print(f"\n{text.table(results, settings, about)}")
    return 1 if failures else 0


def estimate(settings: Settings) -> float:
    """Returns the approximate duration of the demo in seconds."""
    return len(WORKLOADS) * 3 * settings.rounds * settings.seconds * 1.2 + 15 + 3 * settings.epochs


def gain(settings: Settings) -> tuple[list[Result], list[str]]:
    """Runs part 1, and returns the results and the errors."""
    print(
        f"\nPart 1, the gain: batches/s with {text.step(settings)}, persistent workers; median of {settings.rounds} "
        f"rounds of {settings.seconds:g} s (lowest to highest)"
    )
    results, failures = [], []
    for workload in WORKLOADS:
        try:
            with Progress(3 * settings.rounds) as progress:
                results.append(measure(workload, settings, progress))
        except (Failure, RuntimeError) as error:  # RuntimeError: a worker has died
            failures.append(f"{workload.name}: {error}")
            print(f"{workload.name}: FAILED, see the last lines")
            continue
        for line in text.row(results[-1], settings.workers):
            print(line)
    return results, failures


def draw(results: list[Result], settings: Settings) -> None:
    """Writes the picture, if matplotlib is installed.

    Must run before part 2, which makes torch deterministic: from then on, torch fills all memory that it allocates.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print("No picture: matplotlib is not installed (pip install matplotlib).")
        return
    from demo import picture

    picture.write(results, record(PICTURED, settings), PICTURED, settings)
    print(f"Picture of the gains and of rustloader at work: {settings.plot}")


def parse(arguments: list[str] | None) -> Settings:
    """Parses and checks the arguments. Exits if one is wrong, before anything is measured."""
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, Settings()
    add("--seconds", type=positive_seconds, default=default.seconds, help="per measured pass (default: %(default)g)")
    add("--rounds", type=positive_int, default=default.rounds, help="passes per loader (default: %(default)s)")
    add("--workers", type=positive_int, default=default.workers, help="per loader (default: %(default)s)")
    add("--step", type=seconds, default=default.step, metavar="SECONDS", help="training step (default: %(default)g)")
    add("--epochs", type=positive_int, default=default.epochs, help="epochs of the training (default: %(default)s)")
    add("--data", type=Path, default=default.data, metavar="FOLDER", help="for images (default: examples/start/data)")
    add("--plot", type=Path, default=default.plot, metavar="FILE", help="the picture (default: %(default)s)")
    add("--markdown", action="store_true", help="also print the table in Markdown, as in README.md")
    settings = Settings(**vars(parser.parse_args(arguments)))
    if settings.step >= 60:
        parser.error(f"--step must be less than 60 seconds, got {settings.step:g}")
    if settings.plot.suffix not in FORMATS:
        parser.error(f"--plot must end in {', '.join(FORMATS)}, got {settings.plot}")
    if settings.plot.is_dir() or not os.access(settings.plot.absolute().parent, os.W_OK):
        parser.error(f"--plot: cannot write {settings.plot.absolute()}")
    return settings
