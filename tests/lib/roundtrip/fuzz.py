"""Random trees through workers and through the packer, for as long as you like: `make stress KIND=batches`."""

import argparse
import ast
import contextlib
import time
import warnings

import torch
from torch.utils.data import default_collate

from roundtrip.build import OPERATIONS
from roundtrip.build_tensors import DTYPES
from roundtrip.check import Checker, reproducer
from roundtrip.reduce import reduced
from roundtrip.trees import random_samples, random_tree
from roundtrip.ways import Loaders

# Trees of one example: they are under way at the same time.
FOREST = 6
EXAMPLES = 50


def main(argv=None):
    options = arguments(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    checker = Checker()
    loaders = Loaders(workers=options.workers), Loaders(default_collate, workers=options.workers)
    try:
        if options.tree:
            run_one(checker, loaders, ast.literal_eval(options.tree))
        else:
            run_many(checker, loaders, options)
    finally:
        for pair in loaders:
            pair.close()
    report(checker)


def arguments(argv):
    parser = argparse.ArgumentParser(prog="make stress KIND=batches", description=__doc__)
    parser.add_argument("--trees", type=int, default=20_000, help="number of trees (%(default)s)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="first seed (the time)")
    parser.add_argument("--workers", type=int, default=1, help="workers of each loader (%(default)s)")
    parser.add_argument("--tree", help="send only this description, as a failure prints it")
    return parser.parse_args(argv)


def run_one(checker, loaders, index):
    if isinstance(index[0][0], str):
        checker.through_workers(loaders[0], [index])
        checker.through_packer(index)
    else:
        checker.through_workers(loaders[1], [index])


def run_many(checker, loaders, options):
    start = time.monotonic()
    seed = options.seed
    while checker.trees < options.trees:
        some_trees(checker, loaders, seed)
        seed += 1
        took = time.monotonic() - start
        rate = 1000 * took / checker.trees
        print(f"\r{checker.trees} trees, seed {seed - 1}, {took:.0f} s, {rate:.1f} ms a tree ", end="", flush=True)
    print()
    checker.finish()


def some_trees(checker, loaders, seed):
    """Checks the examples of a seed: trees that are sent together, the samples of a batch, trees through the packer."""
    for i in range(EXAMPLES):
        numbers = [(seed * EXAMPLES + i) * FOREST + k for k in range(FOREST)]
        trees, batch = [random_tree(n) for n in numbers], random_samples(numbers[0])
        try:
            checker.through_workers(loaders[0], trees)
            checker.through_workers(loaders[1], [batch])
            for tree in trees:
                checker.through_packer(tree)
        except AssertionError as error:
            shrink(trees, error)
            raise


def shrink(trees, error):
    """Prints a small tree that fails alone, if one does."""
    loaders = Loaders(), None

    def fails(tree):
        try:
            run_one(Checker(), loaders, tree)
        except AssertionError:
            return True
        return False

    print(f"\n{error}\nLooking for a smaller tree ...")
    try:
        for tree in filter(fails, trees):
            small = reduced(tree, fails)
            with contextlib.suppress(AssertionError):
                run_one(Checker(), loaders, small)
            print(reproducer(small))
            return
        print(f"No tree fails alone. Together: {trees!r}")
    finally:
        loaders[0].close()


def report(checker):
    print(f"{checker.trees} trees through workers")
    for title, counts in [
        ("Outcomes", {f"{way}: {outcome}": n for (way, outcome), n in checker.outcomes.items()}),
        (
            "Intended differences",
            {name: f"{n} in {checker.in_trees[name]} trees" for name, n in checker.intended.items()},
        ),
        ("Operations, by trees", {name: checker.steps[name] for name in OPERATIONS}),
    ]:
        print(f"\n{title}")
        cells = [f"{name} {n}" for name, n in counts.items()]
        width = 1 + max(map(len, cells), default=0)
        columns = max(1, 110 // width)
        for i in range(0, len(cells), columns):
            print("  " + "".join(cell.ljust(width) for cell in cells[i : i + columns]).rstrip())
    print(f"\n{len(DTYPES)} dtypes of torch: {' '.join(DTYPES)}")


if __name__ == "__main__":
    main()
