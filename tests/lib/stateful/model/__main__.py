"""The command line: runs random programs, in several processes, and prints those that fail."""

import argparse
import sys

import forked_runs
import torch

from . import generate, processes, shrink
from .program import Program


def arguments():
    parser = argparse.ArgumentParser(
        prog="python -m stateful.model", description="Runs random programs of a StatefulDataLoader against a model."
    )
    parser.add_argument("--programs", type=int, default=100, help="number of programs")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first program")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes at the same time")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds after which a program counts as stuck")
    parser.add_argument("--seconds", type=float, help="stop after this many seconds")
    parser.add_argument("--replay", help="run only this program: the JSON that is printed with a failure")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false", help="print failures as they are")
    return parser.parse_args()


def main():
    args = arguments()
    torch.set_num_threads(1)
    if args.replay:
        programs = [Program.from_json(args.replay)]
    else:
        programs = (generate.program(args.seed + number) for number in range(args.programs))
    return forked_runs.report(findings(args, programs), args.seconds)


def findings(args, programs):
    """The failure of each program, as a text, or None."""
    for program, failure in processes.run_all(programs, args.jobs, args.limit):
        if failure is not None and args.shrink:
            program, failure = shrink.shrink(program, failure, args.limit)
        yield failure and f"FAILURE {program.json()}\n{failure}\n\n{shrink.script(program)}"


if __name__ == "__main__":
    sys.exit(main())
