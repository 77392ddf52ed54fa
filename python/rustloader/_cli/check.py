"""``check``: one epoch on torch's iterator and one on the engine have to be the same."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rustloader._cli.log import warnings

__all__ = ["main"]

# So many errors of `next` in a row are no epoch any more: a worker that has died is told at each call.
_ERRORS_IN_A_ROW = 20


def main(options: Any) -> int:
    """Compares, and says what it found."""
    from rustloader._cli.factory import Unusable, find

    try:
        return _compare(find(options.factory), options)
    except Unusable as error:
        print(f"rustloader check: {error}", file=sys.stderr)
        return 2


def _compare(factory: Callable[[], Any], options: Any) -> int:
    import rustloader
    from rustloader._cli.engines import on_torch
    from rustloader._cli.leaves import difference

    rustloader.uninstall()  # RUSTLOADER_INSTALL may have been set

    def events(engine: Any) -> Iterator[_Event]:
        return _epoch(factory, engine, options)

    print(f"torch       one epoch of {options.factory} ...", flush=True)
    theirs = [event.key for event in events(on_torch)]
    print(f"rustloader  {_counted(theirs)} to compare ...", flush=True)
    before = rustloader.engine_batches()
    with warnings() as lines:
        for k, (key, event) in enumerate(itertools.zip_longest(theirs, events(rustloader.installed))):
            if event is not None and k == 0 and lines and rustloader.engine_batches() == before:
                print(f"rustloader check: nothing to compare: {lines[0]}", file=sys.stderr)
                return 2
            if event is None or key != event.key:
                break
        else:
            print(f"same: {_counted(theirs)}, bit for bit; the main process's random state is the same afterwards")
            print(f"{rustloader.engine_batches() - before} batches came from the Rust engine")
            return 0
    # Once more on torch: as far as here, to have what differs, and to see whether torch agrees with itself.
    again = next(itertools.islice(events(on_torch), k, None), None)
    where = _where(k, key, event)
    if (again.key if again else None) != key:
        print(f"different at {where}, but torch's iterator differs from itself there as well.")
        print("The dataset, the sampler or collate_fn draws on something that no seed governs, or in_order is False.")
        return 1
    if event is None or again is None:
        print(f"different at {where}: {'rustloader' if event is None else 'torch'} had come to its end")
    elif event.kind == again.kind == "batch":
        print(f"different at {where}: {difference(again.value, event.value)}")
    else:
        print(f"different at {where}: torch {again.told()}, rustloader {event.told()}")
    return 1


class _Event:
    """What one call of `next` brought, or what is the case after the last."""

    def __init__(self, kind: str, value: Any, key: Any) -> None:
        self.kind, self.value, self.key = kind, value, (kind, key)

    def told(self) -> str:
        return {"batch": "gives a batch", "error": f"raises {self.value}", "state": "ends the epoch"}[self.kind]


def _epoch(factory: Callable[[], Any], engine: Any, options: Any) -> Iterator[_Event]:
    import numpy as np
    import torch

    from rustloader._cli.factory import make
    from rustloader._cli.leaves import summary

    torch.manual_seed(options.seed)
    np.random.seed(options.seed % 2**32)
    random.seed(options.seed)
    loader = make(factory, options.factory)
    with engine():
        iterator: Any = None
        try:
            errors = taken = 0
            while errors < _ERRORS_IN_A_ROW and taken != options.batches:
                try:
                    if iterator is None:
                        iterator = iter(loader)
                    batch = next(iterator)
                except StopIteration:
                    break
                except Exception as error:
                    errors = _ERRORS_IN_A_ROW if iterator is None else errors + 1
                    text = f"{type(error).__qualname__}: {(str(error).strip().splitlines() or [''])[-1]}"
                    yield _Event("error", text, text)
                else:
                    errors, taken = 0, taken + 1
                    yield _Event("batch", batch, summary(batch))
                    del batch
        finally:
            # Named by the class, so that one with a place of its own for them is not in the way.
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
    state = pickle.dumps((torch.get_rng_state().tolist(), np.random.get_state(), random.getstate()))
    yield _Event("state", None, hashlib.blake2b(state, digest_size=16).digest())


def _counted(keys: list[Any]) -> str:
    batches = sum(kind == "batch" for kind, _ in keys)
    errors = sum(kind == "error" for kind, _ in keys)
    return f"{batches} batches" + (f" and {errors} errors" if errors else "")


def _where(k: int, key: Any, event: _Event | None) -> str:
    kinds = {key[0] if key else None, event.kind if event else None}
    return "the end: the main process's random state" if kinds == {"state"} else f"call {k} of next()"
