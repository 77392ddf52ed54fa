"""The parity table: short programs that observe the same with torch's loader as with rustloader's.

A program is a generator function. Its first parameter, `DataLoader`, is the class of the loader. It yields what it
observes: batches, lengths, loaders, iterators, errors. `rows` turns it into a test with a row for each combination of
the values of its other parameters:

    @rows(workers=[0, 2], batching={"unbatched": dict(batch_size=None), "batches": dict(batch_size=3)})
    def test_batches_come_in_order(DataLoader, workers, batching):
        yield from epochs(DataLoader(Numbers(10), num_workers=workers, **batching))

`epochs(loader)` yields each outcome of `next()` in two whole epochs, errors and ends included; `drain(loader)` those of
one. `attempt(function, ...)` returns what the call returns, or the error as a value. A new value of a dict of the table
(`BATCHING`, `WORKERS`, ...) is often enough. The name of a new program begins with the row of docs/parity.md that it
proves. It observes only what it yields: let the dataset return what it is given if that is the point.

Both runs of a row begin with the same seeds, in this process. What a program yields is described as in the
differential tester (differential/describe.py): types, dtypes, strides, bytes, identity, texts and notes of errors. The
warnings raised meanwhile and the states of all random generators are compared as well. Each batch must come from the
engine.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import random
import tempfile
import textwrap
import warnings
import weakref
from pathlib import Path

import numpy as np
import pairwise
import pytest
import torch
import torch.utils.data
from differential import describe, intended, recorder
from differential.compare import first_difference
from differential.processes import warn_once
from support import TORCH_MODE, DataLoader, TorchDataLoader, engine_batches
from torch.utils.data import dataloader as torch_dataloader

# Calls of next() after which an epoch is aborted.
LIMIT = 2000

# --- helpers for programs -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Raised:
    """An error instead of a value."""

    description: list


END = Raised(["end"])


def attempt(function, *args, **kw):
    """Returns what a call returns, or a Raised."""
    try:
        return function(*args, **kw)
    except StopIteration as error:
        return Raised(describe.error(error)) if error.args else END
    except Exception as error:
        description = Raised(describe.error(error))
        error.__traceback__ = None  # its frames hold iterators
        return description


def take(iterator, calls):
    """Yields the outcome of each of `calls` calls of next()."""
    opened.add(iterator)
    for _ in range(calls):
        seen = attempt(next, iterator)
        if isinstance(iterator, torch_dataloader._MultiProcessingDataLoaderIter) and not isinstance(seen, Raised):
            received[0] += 1
        yield seen


def drain(source, limit=LIMIT):
    """Yields the outcomes of next() until the end, and of two more calls. `source` is an iterator, or a loader that
    creates one."""
    iterator = source if hasattr(source, "__next__") else attempt(iter, source)
    if isinstance(iterator, Raised):
        yield iterator
        return
    ends = 0
    for seen in take(iterator, limit):
        yield seen
        ends = ends + 1 if seen is END else 0
        if ends == 3:
            break


def epochs(loader, count=2):
    """Yields the outcomes of whole epochs."""
    for _ in range(count):
        yield from drain(loader)


def beyond(cls, options):
    """Returns rustloader's class with options that torch does not have, and torch's as it is."""
    return cls if TORCH_MODE or cls is TorchDataLoader else functools.partial(cls, **options)


def plain(batches):
    """Returns outcomes with tensors as lists, for a program that compares them itself."""
    return [seen.tolist() if isinstance(seen, torch.Tensor) else seen for seen in batches if seen is not END]


# --- the table ------------------------------------------------------------------------------------


def rows(pairs=False, engine=True, **values):
    """Turns a program into a test. `values` holds the values of each parameter: a list, or a dict by name. With `pairs`
    there are only enough rows for each pair of values to occur. Without `engine`, rustloader must use torch's iterator.

    A parameter `folder` is an empty folder, and a parameter `patch` is a MonkeyPatch; each run has its own.
    """
    named = {
        name: of if isinstance(of, dict) else {name_of(value): value for value in of} for name, of in values.items()
    }

    def decorate(program):
        def test(**keys):
            difference = compare(program, {name: named[name][key] for name, key in keys.items()}, engine)
            assert not difference, f"{difference}\n\n{as_code(program, keys)}"

        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in named]
        test.__signature__ = inspect.Signature(parameters)
        test.__name__, test.__doc__, test.__module__ = program.__name__, program.__doc__, program.__module__
        test.program, test.values = program, named
        if pairs:
            return pairwise.pairs(**{name: list(of) for name, of in named.items()})(test)
        for name, of in named.items():
            test = pytest.mark.parametrize(name, list(of))(test)
        return test

    return decorate


def name_of(value):
    return getattr(value, "__name__", str(value))


def compare(program, arguments, engine=True):
    """Returns the first difference in what a program observes, or None."""
    torch_events, rustloader_events = (record(program, cls, arguments, engine) for cls in (TorchDataLoader, DataLoader))
    for (a, *_), (b, *_) in zip(torch_events, rustloader_events, strict=False):
        if a[0] == b[0] == "value":
            intended.without_holes(a[1], b[1])
    return first_difference(torch_events, rustloader_events)


def record(program, cls, arguments, engine=True):
    """Returns what a program observes with a loader class, as a list of events."""
    torch.manual_seed(5), random.seed(6), np.random.seed(7)
    received[0], before = 0, engine_batches()
    events = []
    with contextlib.ExitStack() as stack:
        wanted = inspect.signature(program).parameters
        if "folder" in wanted:
            arguments = dict(arguments, folder=Path(stack.enter_context(tempfile.TemporaryDirectory())))
        if "patch" in wanted:
            arguments = dict(arguments, patch=stack.enter_context(pytest.MonkeyPatch.context()))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for seen in itertools.chain(program(cls, **arguments), [END]):
            events += [["warning", *describe.warning(w)] for w in caught if "multi-threaded" not in str(w.message)]
            caught.clear()
            events.append([shown(seen), recorder.rng()])
            del seen
        for iterator in list(opened):  # as cyclic garbage, each of torch's workers would take 5 s
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
        opened.clear()
    if not TORCH_MODE and cls is not TorchDataLoader:
        from_engine = received[0] if engine else 0
        assert engine_batches() - before == from_engine, "batches came from the wrong iterator"
    assert len(events) > 1, "the program observes nothing"
    return events


def shown(seen):
    """Describes what a program has yielded in plain values."""
    if isinstance(seen, Raised):
        return ["raised", seen.description]
    if isinstance(seen, TorchDataLoader):
        return ["loader", *describe.loader(seen)]
    if isinstance(seen, torch_dataloader._BaseDataLoaderIter):
        workers = [[worker.daemon, worker.is_alive(), worker.exitcode] for worker in getattr(seen, "_workers", ())]
        return ["iterator", *describe.iterator(seen), workers, list(getattr(seen, "_workers_status", ()))]
    return ["value", describe.value(seen)]


def as_code(program, keys):
    """Returns a row as runnable code, with the source of its program."""
    file = Path(inspect.getsourcefile(program))
    given = "".join(f", {name}=test.values[{name!r}][{key!r}]" for name, key in keys.items())
    return f"""\
# Run with {" and ".join(f"tests/{part}" for part in ("lib", f"python/{file.parent.name}"))} in PYTHONPATH.
import torch.utils.data, rustloader
from {file.stem} import {program.__name__} as test
for cls in (torch.utils.data.DataLoader, rustloader.DataLoader):
    for seen in test.program(cls{given}):
        print(seen)

{textwrap.dedent(inspect.getsource(program))}"""


# The iterators of the running program, and how many batches came from workers.
opened, received = weakref.WeakSet(), [0]
warn_once()
