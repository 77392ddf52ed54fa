"""The command line of the differential tester."""

import argparse
import contextlib
import itertools
import json
import sys

import forked_runs
import torch

from . import actors, compare, coverage, generate, processes, shrink
from .program import START_METHODS, Program


def arguments():
    parser = argparse.ArgumentParser(prog="python -m differential", description="Runs programs through both loaders.")
    parser.add_argument("--programs", type=int, default=100, help="number of programs")
    parser.add_argument("--seed", default="0", help="seed of the generator; a seed gives the same programs each time")
    parser.add_argument("--start-method", choices=START_METHODS, default="fork", help="start method of the workers")
    parser.add_argument("--seconds", type=float, help="stop after this many seconds")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes at the same time")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME=VALUE", help="only programs with this value"
    )
    parser.add_argument("--coverage", action="count", default=0, help="report what was tried; in detail if given twice")
    parser.add_argument("--replay", help="run only this program: the JSON that is printed with a difference")
    parser.add_argument("--shrink", action="store_true", help="shrink programs that show a difference")
    parser.add_argument("--show", action="store_true", help="also print the records")
    parser.add_argument("--save", help="append differences to this file")
    return parser.parse_args()


def main():
    args = arguments()
    torch.set_num_threads(1)
    generator = generate.Generator(args.seed, args.start_method, dict(text.split("=", 1) for text in args.only))
    programs = [Program.from_json(args.replay)] if args.replay else itertools.islice(generator, args.programs)
    with actors.cluster() if args.start_method == "ray" else contextlib.nullcontext():
        return run(args, generator, programs)


def run(args, generator, programs):
    """Runs programs and reports differences; returns the exit status."""
    tally = coverage.Coverage()
    status = forked_runs.report(findings(args, programs, tally), args.seconds)
    if args.coverage:
        print(tally.report(generate.all_pairs(), generator.impossible, args.coverage > 1))
    return status


def findings(args, programs, tally):
    """The differences that each program shows, as a text, or None."""
    for program, *records in processes.run_all(programs, args.jobs):
        tally.add(program, records[0])
        differences = compare.differences(program, *records)
        if differences and args.shrink:
            program, differences = shrink.shrink(program)
        if args.show:
            print(json.dumps(dict(zip(compare.NAMES, records, strict=False)), indent=1))
        text = "\n".join([f"DIFFERENCE {program.json()}", *differences, ""]) if differences else None
        if text and args.save:
            with open(args.save, "a") as file:
                file.write(text)
        yield text


if __name__ == "__main__":
    sys.exit(main())
