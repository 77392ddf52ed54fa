"""The command line: ``python -m rustloader``, and the script ``rustloader``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from rustloader._cli.arguments import add_options, counts, positive_int, positive_seconds, seconds, seed, valued_flags

__all__ = ["main"]

_ABOUT = "A drop-in replacement for torch.utils.data.DataLoader with a Rust engine."
_EXAMPLES = """\
examples:
  {prog} doctor
  {prog} run train.py --epochs 3
  {prog} check train.py:make_loader
  {prog} bench train.py:make_loader
  {prog} top
"""
_RUN = """\
Runs a script as `python script ...` does, and calls rustloader.install() as soon as the script imports torch: every
DataLoader with workers uses the Rust engine, whichever library builds it. Processes that the program starts with
multiprocessing do the same. The options apply to loaders that leave them at torch's default. Exit status: the
script's."""
_RUN_EXAMPLES = """\
examples:
  {prog} run train.py --epochs 3
  {prog} run -m mypackage.train --epochs 3
  {prog} run --prefetch-factor 4 train.py
  torchrun --nproc-per-node 2 -m rustloader run train.py
  accelerate launch -m rustloader run train.py
"""
_DOCTOR = """\
Checks what the engine needs on this machine, and runs a small loader on it. Prints one block to copy into a bug
report. Exit status: 0 if the engine works here, 1 if loaders run on torch's iterator."""
_CHECK = """\
Compares one epoch of a loader on torch's iterator with one on the engine, bit for bit. The factory takes no arguments
and returns a DataLoader. It is called in a process of its own for each, with the same seeds. A dead worker, or a wait
longer than --timeout, ends the comparison. Exit status: 0 if nothing differs, 1 if something does, 2 if there was
nothing to compare."""
_CHECK_EXAMPLES = """\
examples:
  {prog} check mypackage.data:train_loader
  {prog} check train.py:make_loader --batches 100

the factory, in train.py:
  def make_loader():
      return DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4)
"""
_BENCH = """\
Measures your loader on torch's iterator and on the Rust engine, each in a process of its own, epoch by epoch in turn.
Prints which one is faster, and what limits the loader. The factory takes no arguments and returns a DataLoader. Exit
status: 0, or 2 if there was nothing to measure."""
_BENCH_EXAMPLES = """\
examples:
  {prog} bench train.py:make_loader
  {prog} bench train.py:make_loader --step 0.05
  {prog} bench mypackage.data:train_loader --workers 0,1,2,4,8 --plot sweep.png
  {prog} bench train.py:make_loader --budget 300 --json > bench.json

the factory, in train.py:
  def make_loader():
      return DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4)
"""
_VERBOSE = "print the whole traceback of an error in your code"
_TOP = """\
Shows what the loaders of a running process do: for each worker its state, the batch it is at and for how long, where
its time goes, and its memory; what the main process waits for, batches/s, and the verdict. Without a PID it shows the
only process of this user that has loaders at work. It reads the shared memory of the loaders and costs the process
nothing. Ctrl-C or q ends it. Exit status: 0, or 2 if there was nothing to see."""
_TOP_EXAMPLES = """\
examples:
  {prog} top
  {prog} top 12345
  {prog} top 12345 --once
  {prog} top 12345 --json --interval 10 > loaders.json
"""
# Commands that compare both engines. Their modules use what other systems lack.
_LINUX_ONLY = ("bench", "check")


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
    if options.command in _LINUX_ONLY and not sys.platform.startswith("linux"):
        text = "the engine runs on Linux only: there is nothing to compare"
        print(f"rustloader {options.command}: {text}", file=sys.stderr)
        return 2
    command = importlib.import_module(f"rustloader._cli.{options.command}")
    if options.command == "run":
        return int(command.main(options, rest))
    from rustloader._cli.ending import Terminated, terminable

    if sys.stdout is None:  # closed
        sys.stdout = open(os.devnull, "w")
    try:
        with terminable():
            status = int(command.main(options))
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\nrustloader {options.command}: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT
    except Terminated as error:
        print(f"rustloader {options.command}: terminated", file=sys.stderr)
        return 128 + int(error.args[0])
    except BrokenPipeError:
        # The reader of the pipe, `head` for example, has closed it. Python would report that again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, a signal that Windows does not have
    return status


def _before_script(given: list[str]) -> tuple[list[str], list[str]]:
    """Splits what is ours, with the script's name, from the script's own arguments."""
    k = 1
    while k < len(given) and given[k].startswith("-"):
        k += 2 if given[k] in valued_flags() else 1
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
    parser.add_argument("--version", action="store_const", const="version", dest="command", help="print the versions")
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
    run.add_argument("-m", dest="module", action="store_true", help="the script is a module, as with python -m")
    add_options(run)
    run.add_argument("script", help="the script; what follows it are its own arguments")

    doctor = command("doctor", "check whether the engine works on this machine", _DOCTOR)
    doctor.add_argument("--json", action="store_true", help="print JSON")

    check = command("check", "compare a loader's batches on both engines", _CHECK, _CHECK_EXAMPLES)
    add = check.add_argument
    add("factory", help="module:function or file.py:function")
    add("--batches", type=positive_int, metavar="N", help="compare the first N batches (default: the whole epoch)")
    add("--seed", type=seed, default=0, metavar="N", help="seed for torch, numpy and random (default: 0)")
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
    add(
        "--step",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="simulate a training step by sleeping SECONDS per batch (default: 0)",
    )
    amount = bench.add_mutually_exclusive_group()
    amount.add_argument(
        "--budget",
        type=positive_seconds,
        metavar="SECONDS",
        help="measure for up to SECONDS in all, or until the result is clear (default: 60 per number of workers)",
    )
    amount.add_argument("--epochs", type=positive_int, metavar="N", help="measure exactly N epochs of each engine")
    add("--batches", type=positive_int, metavar="N", help="batches per epoch, at most (default: all)")
    add("--seconds", type=positive_seconds, metavar="S", help="seconds per epoch, at most (default: 3)")
    add(
        "--timeout",
        type=positive_seconds,
        default=60.0,
        metavar="SECONDS",
        help="give up after SECONDS without progress (default: 60)",
    )
    add("--plot", metavar="FILE", help="draw a timeline of the main process and the workers (needs matplotlib)")
    add("--json", action="store_true", help="print JSON")
    add("--verbose", action="store_true", help=_VERBOSE)

    top = command("top", "show what the loaders of a running process do", _TOP, _TOP_EXAMPLES)
    top.add_argument("pid", nargs="?", type=positive_int, metavar="PID", help="the process (default: the only one)")
    top.add_argument("--once", action="store_true", help="print it once, as plain text")
    top.add_argument("--json", action="store_true", help="print it once, as JSON")
    top.add_argument(
        "--interval",
        type=positive_seconds,
        default=1.0,
        metavar="SECONDS",
        help="seconds between two samples; rates and shares cover this interval (default: 1)",
    )
    return parser
