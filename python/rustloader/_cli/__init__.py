"""The command line: ``python -m rustloader``, and the script ``rustloader``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from rustloader._cli.arguments import counts, integer, positive_int, positive_seconds, seconds

__all__ = ["main"]

_ABOUT = "A drop-in replacement for torch.utils.data.DataLoader with a Rust engine."
_EXAMPLES = """\
examples:
  {prog} doctor
  {prog} run train.py --epochs 3
  {prog} check train.py:make_loader
  {prog} bench train.py:make_loader
"""
_RUN = """\
Runs a script as `python script ...` does, with rustloader.install() in force as soon as it imports torch: every
DataLoader with workers uses the Rust engine, whoever builds it. Processes that the program spawns by multiprocessing
do the same. The options are for loaders that have torch's default for them."""
_RUN_EXAMPLES = """\
examples:
  {prog} run train.py --epochs 3
  {prog} run -m mypackage.train --epochs 3
  {prog} run --prefetch-factor 4 train.py
  torchrun --nproc-per-node 2 -m rustloader run train.py
  accelerate launch -m rustloader run train.py
"""
_DOCTOR = """\
Looks at what the engine needs of this machine, and lets it deliver some batches. Exit status: 0 if the engine works
here, 1 if loaders would be handed to torch's iterator."""
_CHECK = """\
Compares one epoch of a loader on torch's iterator with one on the engine, bit for bit. The factory is called for each,
with the same seeds; it takes no arguments and returns a DataLoader. Exit status: 0 if nothing differs, 1 if something
does, 2 if there was nothing to compare."""
_CHECK_EXAMPLES = """\
examples:
  {prog} check mypackage.data:train_loader
  {prog} check train.py:make_loader --batches 100

the factory, in train.py:
  def make_loader():
      return DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4)
"""
_BENCH = """\
Measures a loader of yours on torch's iterator and on the engine, each in a process of its own, epoch by epoch in turn,
and says by how much they differ and what limits. The factory takes no arguments and returns a DataLoader. Exit
status: 0, or 2 if there was nothing to measure."""
_BENCH_EXAMPLES = """\
examples:
  {prog} bench train.py:make_loader
  {prog} bench train.py:make_loader --step 0.05
  {prog} bench mypackage.data:train_loader --workers 0,1,2,4,8 --plot sweep.png
  {prog} bench train.py:make_loader --epochs 5 --batches 500 --json > bench.json

the factory, in train.py:
  def make_loader():
      return DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4)
"""
_VERBOSE = "print the whole traceback of an error in your code"
# Options of `run` whose value is the next argument.
_VALUED = ("--prefetch-factor", "--multiprocessing-context")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command: its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    rest: list[str] = []
    if given[:1] == ["run"]:
        given, rest = _before_script(given)
    parser = _parser()
    options = parser.parse_args(given)
    if options.command is None:
        parser.print_help()
        return 2
    command = importlib.import_module(f"rustloader._cli.{options.command}")
    return int(command.main(options, rest) if options.command == "run" else command.main(options))


def _before_script(given: list[str]) -> tuple[list[str], list[str]]:
    """Splits what is ours, with the script's name, from the script's own arguments."""
    k = 1
    while k < len(given) and given[k].startswith("-"):
        k += 2 if given[k] in _VALUED else 1
    return given[: k + 1], given[k + 1 :]


def _parser() -> argparse.ArgumentParser:
    by_name = os.path.basename(sys.argv[0]) == "rustloader"
    prog = "rustloader" if by_name else "python -m rustloader"

    parser = argparse.ArgumentParser(
        prog=prog,
        description=_ABOUT,
        epilog=_EXAMPLES.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_const", const="version", dest="command", help="say the versions")
    commands = parser.add_subparsers(dest="command", metavar="command")

    def command(name: str, help: str, about: str, examples: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=help,
            description=about,
            epilog=examples.format(prog=prog),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    run = command("run", "run a script on the Rust engine", _RUN, _RUN_EXAMPLES)
    run.add_argument("-m", dest="module", action="store_true", help="the script is named as a module, as by python -m")
    run.add_argument("--out-of-order", action="store_true", help="deliver batches as they are ready (in_order=False)")
    run.add_argument("--prefetch-factor", type=positive_int, metavar="N", help="batches that each worker has under way")
    run.add_argument("--persistent-workers", action="store_true", help="keep the workers from epoch to epoch")
    run.add_argument(
        "--multiprocessing-context",
        choices=["fork", "forkserver", "spawn"],
        metavar="METHOD",
        help="how workers are started: fork, forkserver or spawn",
    )
    run.add_argument("script", help="the script; all that follows it is the script's")

    doctor = command("doctor", "say whether the engine works on this machine", _DOCTOR)
    doctor.add_argument("--json", action="store_true", help="as JSON")

    check = command("check", "compare a loader's batches on both engines", _CHECK, _CHECK_EXAMPLES)
    add = check.add_argument
    add("factory", help="module:function or file.py:function")
    add("--batches", type=positive_int, metavar="N", help="compare the first N batches (default: the whole epoch)")
    add("--seed", type=integer, default=0, metavar="N", help="seed for torch, numpy and random (default: 0)")
    add(
        "--timeout",
        type=positive_seconds,
        default=60.0,
        metavar="SECONDS",
        help="give up after SECONDS without progress (default: 60)",
    )
    add("--verbose", action="store_true", help=_VERBOSE)

    bench = command("bench", "measure a loader on both engines", _BENCH, _BENCH_EXAMPLES)
    add = bench.add_argument
    add("factory", help="module:function or file.py:function")
    add("--workers", type=counts, metavar="N,...", help="measure with each num_workers, and recommend one")
    add("--step", type=seconds, default=0.0, metavar="SECONDS", help="a training step of so long, which sleeps (0)")
    add("--epochs", type=positive_int, default=3, metavar="N", help="measured epochs of each loader (%(default)s)")
    add("--batches", type=positive_int, metavar="N", help="batches per epoch, at most")
    add(
        "--seconds",
        type=positive_seconds,
        default=5.0,
        metavar="S",
        help="seconds of an epoch at the most (%(default)s)",
    )
    add("--json", action="store_true", help="print JSON")
    add("--verbose", action="store_true", help=_VERBOSE)
    add("--plot", metavar="FILE.png", help="draw what main and workers do when, and the rates (needs matplotlib)")
    return parser
