"""Defines the arguments of the command line, and their help."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rustloader.settings.option_values import Kind
from rustloader.settings.options import Option, Options, option_of
from rustloader.system.similar import similar
from rustloader.tools.bench.settings import SWEPT

# Maximum duration in seconds: a year. The system's clocks and waits overflow after a few hundred years.
_MAX_SECONDS = 366 * 86400
# Maximum number of workers in a sweep.
_MAX_WORKERS = 1024
_Number = TypeVar("_Number", int, float)

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
DataLoader with workers uses the Rust engine, whichever library builds it. This includes loaders in processes that the
program starts with multiprocessing. The options apply to loaders that leave them at torch's default. Exit status: the
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
Checks whether this machine has what the engine needs, and runs a small loader on the engine. Prints a block to copy
into a bug report. Exit status: 0 if the engine works here, 1 if loaders run on torch's iterator."""
_CHECK = """\
Compares one epoch of a loader on torch's iterator with one on the engine, bit for bit. The factory takes no arguments
and returns a DataLoader. It is called in a separate process for each engine, with the same seeds. A dead worker, or a
wait longer than --timeout, ends the comparison. Exit status: 0 if nothing differs, 1 if something does, 2 if there was
nothing to compare."""
_CHECK_EXAMPLES = """\
examples:
  {prog} check mypackage.data:train_loader
  {prog} check train.py:make_loader --batches 100
"""
_BENCH = """\
Measures your loader on torch's iterator and on the Rust engine, in separate processes that run epochs in turn. Prints
which one is faster, and what limits the loader. Further factories are measured on the engine, and compared with the
first one: the same loader with a cache, with workers on a cluster, or with another decoder. A factory takes no
arguments and returns a DataLoader. Exit status: 0, or 2 if there was nothing to measure."""
_BENCH_EXAMPLES = """\
examples:
  {prog} bench train.py:make_loader
  {prog} bench train.py:make_loader --step 0.05
  {prog} bench train.py:make_loader train.py:cached_loader
  {prog} bench mypackage.data:train_loader --workers 0,1,2,4,8
  {prog} bench train.py:make_loader --dispatch round_robin,shared_queue --reorder-window 16,32
  {prog} bench train.py:make_loader --budget 300 --json > bench.json
"""
_FACTORY = "module:function or file.py:function"
_FACTORY_EXAMPLE = """
the factory, in train.py:
  def make_loader():
      return DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4)
"""
_TOP = """\
Shows what the loaders of a running process are doing. For each worker: its state, its current batch and the time spent
on it, a breakdown of its time, and its memory. For the main process: what it waits for, batches/s, and the verdict.
Without a PID, shows the only process of this user that has active loaders. Reads the shared memory of the loaders, at
no cost to the process. Ctrl-C or q quits. Exit status: 0, or 2 if there was nothing to show."""
_TOP_EXAMPLES = """\
examples:
  {prog} top
  {prog} top 12345
  {prog} top 12345 --once
  {prog} top 12345 --json --interval 10 > loaders.json
"""
_TRACE = """\
Runs a script as `run` does, and records the work of its loaders and their workers in a file for
https://ui.perfetto.dev. `trace merge` merges several files into one, including those of other ranks and of
torch.profiler. Exit status: the script's."""
_TRACE_EXAMPLES = """\
examples:
  {prog} trace train.py
  {prog} trace -o run.json.gz --seconds 60 train.py
  {prog} trace --level sample -m mypackage.train
  torchrun -m rustloader trace -o run.json.gz train.py
  {prog} trace merge run-rank0.json.gz run-rank1.json.gz -o all.json.gz
"""


class _Parser(argparse.ArgumentParser):
    """A parser that reports unknown arguments with the usage of their command, and with the names that were meant."""

    commands: Iterable[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if args and self.commands and not args[0].startswith("-") and args[0] not in self.commands:
            if meant := similar(args[0], self.commands):
                self.error(f"there is no command {args[0]!r}; did you mean {meant}?")
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # The value of an unknown flag has been taken for another argument, which is then left over.
            unknown = [it for it in unknown if it.startswith("-")] or unknown
            flags = re.findall(r"--?[a-z][a-z-]*", self.format_usage())
            close = (similar(it.partition("=")[0], flags) for it in unknown)
            meant = ", ".join(dict.fromkeys(filter(None, close)))
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean {meant}?" if meant else ""))
        return found, unknown


def script_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits the arguments of `run` or `trace` after the script's name. The second part is passed to the script."""
    valued = _valued_flags() if arguments[0] == "run" else {"-o", "--output", "--seconds", "--level"}
    k = 1
    while k < len(arguments) and arguments[k].startswith("-"):
        k += 2 if arguments[k] in valued else 1
    return arguments[: k + 1], arguments[k + 1 :]


def make_parser() -> argparse.ArgumentParser:
    """Creates the parser for all commands."""
    prog = "rustloader" if os.path.basename(sys.argv[0]) == "rustloader" else "python -m rustloader"

    def descriptions(about: str, examples: str) -> dict[str, Any]:
        return {
            "description": about,
            "epilog": examples.format(prog=prog),
            "formatter_class": argparse.RawDescriptionHelpFormatter,
            "allow_abbrev": False,
        }

    parser = _Parser(prog=prog, **descriptions(_ABOUT, _EXAMPLES))
    parser.add_argument("--version", action="store_const", const="version", dest="command", help="print the versions")
    commands = parser.add_subparsers(dest="command", metavar="command")

    parser.commands = commands.choices

    def command(name: str, help: str, about: str, examples: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help, **descriptions(about, examples))

    run = command("run", "run a script on the Rust engine", _RUN, _RUN_EXAMPLES)
    run.add_argument("-m", dest="module", action="store_true", help="the script is a module, as with python -m")
    _add_options(run)
    run.add_argument("script", help="the script; the arguments after it belong to the script")

    doctor = command("doctor", "check whether the engine works on this machine", _DOCTOR)
    doctor.add_argument("--json", action="store_true", help="print JSON")

    check = command("check", "compare a loader's batches on both engines", _CHECK, _CHECK_EXAMPLES + _FACTORY_EXAMPLE)
    add = check.add_argument
    add("factory", help=_FACTORY)
    add("--batches", type=positive_int, metavar="N", help="compare the first N batches (default: the whole epoch)")
    add("--seed", type=seed, default=0, metavar="N", help="seed for torch, numpy and random (default: 0)")
    _add_shared(add)

    bench = command("bench", "measure a loader on both engines", _BENCH, _BENCH_EXAMPLES + _FACTORY_EXAMPLE)
    add = bench.add_argument
    factories_help = f"{_FACTORY}; all of them stand together, and the first is the baseline of the others"
    add("factories", nargs="+", metavar="factory", help=factories_help)
    add("--workers", type=counts, metavar="N,...", help="measure with each num_workers, and recommend one")
    for name in SWEPT:
        option, values = option_of(name), f"{option_of(name).metavar},..."
        add(option.flag, dest=name, type=_parser_of_list(option), metavar=values, help=f"measure with each {name}")
    step_help = "simulate a training step by sleeping SECONDS per batch (default: 0)"
    add("--step", type=seconds, default=0.0, metavar="SECONDS", help=step_help)
    amount = bench.add_mutually_exclusive_group()
    budget_help = "measure for up to SECONDS in total, or until the result is clear (default: 60 per setting)"
    amount.add_argument("--budget", type=positive_seconds, metavar="SECONDS", help=budget_help)
    amount.add_argument("--epochs", type=positive_int, metavar="N", help="measure exactly N epochs of each loader")
    add("--batches", type=positive_int, metavar="N", help="maximum number of batches per epoch (default: all)")
    add("--seconds", type=positive_seconds, metavar="S", help="maximum seconds per epoch (default: 3)")
    add("--json", action="store_true", help="print JSON")
    _add_shared(add)

    top = command("top", "show what the loaders of a running process are doing", _TOP, _TOP_EXAMPLES)
    pid_help = "the process (default: the only one with active loaders)"
    top.add_argument("pid", nargs="?", type=positive_int, metavar="PID", help=pid_help)
    top.add_argument("--once", action="store_true", help="print one table as plain text, and exit")
    top.add_argument("--json", action="store_true", help="print one JSON object, and exit")
    interval_help = "seconds between two observations; rates and shares cover this interval (default: 1)"
    top.add_argument("--interval", type=positive_seconds, default=1.0, metavar="SECONDS", help=interval_help)

    trace = command("trace", "run a script, and write a trace of its loaders", _TRACE, _TRACE_EXAMPLES)
    trace.add_argument("-m", dest="module", action="store_true", help="the script is a module, as with python -m")
    output_help = "the trace (default: trace.json.gz); without .gz it is not compressed. If there are several ranks, "
    output_help += "the name contains the rank, as in trace-rank0.json.gz; {rank} in FILE stands for the rank"
    trace.add_argument("-o", "--output", metavar="FILE", help=output_help)
    seconds_help = "keep only the last SECONDS of the run"
    trace.add_argument("--seconds", type=positive_seconds, metavar="SECONDS", help=seconds_help)
    level_help = "record a slice per batch (default), or also one per sample"
    trace.add_argument("--level", choices=("batch", "sample"), default="batch", help=level_help)
    trace.add_argument(
        "script", help="the script; the arguments after it belong to the script. Or: merge FILE ... -o FILE"
    )
    return parser


def _add_shared(add: Callable[..., object]) -> None:
    """Adds the options that `check` and `bench` share; both run the user's code in other processes."""
    timeout_help = "give up after SECONDS without progress (default: 60)"
    add("--timeout", type=positive_seconds, default=60.0, metavar="SECONDS", help=timeout_help)
    add("--verbose", action="store_true", help="print the whole traceback of an error in your code")


def seed(text: str) -> int:
    """Parses an integer that ``torch.manual_seed`` accepts."""
    return _number(int, text, lambda it: -(2**63) <= it < 2**64, "a 64-bit integer")


def positive_int(text: str) -> int:
    """Parses an integer of 1 or more."""
    return _number(int, text, lambda it: it >= 1, "a positive integer")


def seconds(text: str) -> float:
    """Parses a duration in seconds, from 0 to a year."""
    return _number(float, text, lambda it: 0 <= it <= _MAX_SECONDS, "a number of seconds from 0 to a year")


def positive_seconds(text: str) -> float:
    """Parses a duration in seconds that is greater than 0 and at most a year."""
    return _number(float, text, lambda it: 0 < it <= _MAX_SECONDS, "a positive number of seconds, up to a year")


def counts(text: str) -> list[int]:
    """Parses a comma-separated list of integers from 0 to 1,024. Sorts it and removes duplicates.

    ``"4,0,2"`` becomes ``[0, 2, 4]``.
    """
    expected = f"a comma-separated list of integers, each from 0 to {_MAX_WORKERS:,} (such as 0,2,4)"
    try:
        return sorted({_number(int, part, lambda it: 0 <= it <= _MAX_WORKERS, "") for part in text.split(",")})
    except argparse.ArgumentTypeError:
        raise _error(expected, text) from None


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of ``Options``. All flags default to None."""
    for name in Options.__dataclass_fields__:
        option = option_of(name)
        if option.metavar:
            parser.add_argument(
                option.flag, dest=name, type=_parser(option.kind), metavar=option.metavar, help=option.help
            )
        else:
            parser.add_argument(option.flag, dest=name, action="store_const", const=option.flag_value, help=option.help)


def _valued_flags() -> set[str]:
    """Returns the flags of ``Options`` that take the next argument as their value."""
    return {option.flag for option in map(option_of, Options.__dataclass_fields__) if option.metavar}


def _parser(kind: Kind) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return kind.parse(text)
        except ValueError:
            raise _error(kind.expected, text) from None

    return parse


def _parser_of_list(option: Option) -> Callable[[str], list[Any]]:
    """Returns the parser for comma-separated values of an option. It removes duplicates and keeps the order."""

    def parse(text: str) -> list[Any]:
        return list(dict.fromkeys(_parser(option.kind)(part.strip()) for part in text.split(",")))

    return parse


def _number(kind: Callable[[str], _Number], text: str, valid: Callable[[_Number], bool], expected: str) -> _Number:
    with contextlib.suppress(ValueError):
        if valid(number := kind(text)):
            return number
    raise _error(expected, text)


def _error(expected: str, text: str) -> argparse.ArgumentTypeError:
    given = repr(text)
    with contextlib.suppress(ValueError):
        if math.isfinite(float(text)):
            given = text
    return argparse.ArgumentTypeError(f"must be {expected}, got {given}")
