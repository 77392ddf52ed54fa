"""Programs that draw what ``seed_by`` seeds: the same batches with any number of workers and in any order of tasks.

torch's loader draws other numbers, so several runs of rustloader's loader are compared with each other.
"""

import collections
import dataclasses
import json

from .program import FIXED_ORDER


def runs(program):
    """The runs of a program whose records are compared: (loader, program). Usually both loaders run the program; if
    ``seed_by`` decides what it draws, rustloader's runs it without workers, unchanged, and with other workers."""
    if not program.is_seeded:
        return [("torch", program), ("rustloader", program)]
    plain = dict.fromkeys(("prefetch_factor", "dispatch", "reorder_window", "overlap_epochs"))
    without = dataclasses.replace(
        program, num_workers=0, persistent=False, timeout=0, context="none", init="none", **plain
    )
    persists = not program.persistent and may_persist(program)
    others = dict(
        num_workers=1 if program.num_workers == 2 else 2,
        dispatch=None if program.dispatch else "shared_queue",
        reorder_window=None if program.reorder_window else 5,
        persistent=persists,
        overlap_epochs=program.overlap_epochs if persists else None,
    )
    return [("rustloader", p) for p in (without, program, dataclasses.replace(program, **others))]


def may_persist(program):
    """Whether persistent workers change nothing: they keep an earlier copy of the dataset, and only one base
    seed is drawn."""
    return program.sampler in FIXED_ORDER and program.pattern in ("full epochs", "break", "in a thread", "guarded")


def differences(program, records):
    """A text for each run whose batches differ from those of the run without workers."""
    first, *others = (passes(program, record["main"]) for record in records)
    texts = []
    for name, other in zip(("our run", "our other run"), others, strict=True):
        for number in range(max(len(first), len(other))):
            a, b = (walks[number] if number < len(walks) else None for walks in (first, other))
            if a != b:
                texts.append(f"pass {number}\n  without workers: {a}\n  {name}: {b}")
                break
    return texts


def passes(program, events):
    """What each pass over the data yielded: values, that there was an error, and the states of main's generators at the
    end of the first pass (a persistent iterator draws no further base seed). If batches arrive in any order, it is
    sorted, and only counted if an epoch may be left early."""
    all_passes, open_passes = [], {}
    for k, event in enumerate(events):
        if event[0] == "opened":
            open_passes[event[1]] = []
            all_passes.append(open_passes[event[1]])
        elif event[0] == "next":
            outcomes = open_passes[event[1]]
            kind = event[2]
            outcomes.append(json.dumps(event[3]) if kind == "value" else kind)
            if kind == "end" and len(all_passes) == 1 and not program.breaks_off:
                outcomes.append(json.dumps(next(e for e in events[k:] if e[0] == "rng")))
    if program.in_order:
        return all_passes
    if program.breaks_off:
        return [collections.Counter("end" if text == "end" else "answer" for text in p) for p in all_passes]
    return [sorted(outcomes) for outcomes in all_passes]
