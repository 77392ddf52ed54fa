"""The command line of the differential tester."""

import argparse
import contextlib
import itertools
import json
import sys
import time

import torch

from . import actors, compare, coverage, generate, processes, shrink
from .program import START_METHODS, Program


def arguments():
    parser = argparse.ArgumentParser(prog="python -m differential", description="Runs programs through both loaders.")
    parser.add_argument("--programs", type=int, default=100, help="how many")
    parser.add_argument("--seed", default="0", help="of the generator; the same programs for the same seed")
    parser.add_argument("--start-method", choices=START_METHODS, default="fork", help="of the workers")
    parser.add_argument("--seconds", type=float, help="stop after this many seconds, with the programs done by then")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--only", action="append", default=[], metavar="NAME=VALUE", help="programs with this value")
    parser.add_argument("--coverage", action="count", default=0, help="say what was tried; twice: at length")
    parser.add_argument("--replay", help="run this program alone: the JSON that a difference was printed with")
    parser.add_argument("--shrink", action="store_true", help="make programs with a difference smaller")
    parser.add_argument("--show", action="store_true", help="print the records as well")
    parser.add_argument("--save", help="append differences to this file")
    return parser.parse_args()


def main():
    args = arguments()
    torch.set_num_threads(1)
    torch.multiprocessing.set_start_method("fork", force=True)
    wanted = [text.split("=", 1) for text in args.only]
    generator = generate.Generator(
        args.seed, args.start_method, lambda p: all(v in map(str, p.value_of(name)) for name, v in wanted)
    )
    programs = [Program.from_json(args.replay)] if args.replay else itertools.islice(generator, args.programs)
    with actors.cluster() if args.start_method == "ray" else contextlib.nullcontext():
        return run(args, generator, programs)


def run(args, generator, programs):
    """Runs programs and reports: the exit status."""
    start, different, tried = time.monotonic(), 0, coverage.Coverage()
    runs = processes.run_all(programs, args.jobs)
    for program, *records in runs:
        tried.add(program, records[0])
        found = compare.differences(program, *records)
        if found:
            different += 1
            if args.shrink:
                program, found = shrink.shrink(program)
            report = "\n".join([f"DIFFERENCE {program.json()}", *found, ""])
            print(report, flush=True)
            if args.save:
                with open(args.save, "a") as f:
                    f.write(report)
        if args.show:
            print(json.dumps(dict(zip(compare.NAMES, records, strict=False)), indent=1))
        if tried.programs % 100 == 0:
            print(f"... {tried.programs} programs, {different} with differences", file=sys.stderr, flush=True)
        if args.seconds and time.monotonic() - start > args.seconds:
            runs.close()
    if args.coverage:
        print(tried.report(generate.all_pairs(), generator.impossible, args.coverage > 1))
    print(f"{tried.programs} programs in {time.monotonic() - start:.0f} s, {different} with differences")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
