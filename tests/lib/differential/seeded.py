"""Programs that draw what ``seed_by`` seeds: the same with any number of workers, and in any order of tasks.

torch's loader gives other numbers, so these programs are compared with themselves.
"""

import collections
import dataclasses
import json

from .program import UNMOVED


def runs(program):
    """The runs of a program whose records are compared: (whose loader, the program). Usually both loaders run it; if
    ``seed_by`` decides what it draws, rustloader's runs it without workers, as it is, and with others."""
    if not program.is_seeded:
        return [("torch", program), ("ours", program)]
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
    return [("ours", p) for p in (without, program, dataclasses.replace(program, **others))]


def may_persist(program):
    """Whether persistent workers change nothing: they have an earlier copy, and draw a base seed once."""
    return program.sampler in UNMOVED and program.pattern in ("full epochs", "break", "in a thread", "guarded")


def differences(program, records):
    """Texts, one for each run whose batches are not those of the run without workers."""
    first, *others = (passes(program, record["main"]) for record in records)
    found = []
    for name, other in zip(("our run", "our other run"), others, strict=True):
        for number in range(max(len(first), len(other))):
            a, b = (walks[number] if number < len(walks) else None for walks in (first, other))
            if a != b:
                found.append(f"pass {number}\n  without workers: {a}\n  {name}: {b}")
                break
    return found


def passes(program, events):
    """What each pass over the data gave: values, that there was an error, and where main's generators were at the end
    of the first one (a persistent iterator draws no further base seed). In order, or sorted; of an epoch in any order
    that was left, only how many."""
    found, open_passes = [], {}
    for k, event in enumerate(events):
        if event[0] == "opened":
            open_passes[event[1]] = []
            found.append(open_passes[event[1]])
        elif event[0] == "next":
            given = open_passes[event[1]]
            kind = event[2]
            given.append(json.dumps(event[3]) if kind == "value" else kind)
            if kind == "end" and len(found) == 1 and not program.breaks_off:
                given.append(json.dumps(next(e for e in events[k:] if e[0] == "rng")))
    if program.in_order:
        return found
    if program.breaks_off:
        return [collections.Counter("value" if text not in ("error", "end") else text for text in p) for p in found]
    return [sorted(given) for given in found]
