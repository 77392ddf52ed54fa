"""The intended differences of rustloader's own options, each with its reason and as narrow as possible: like
``intended.py``, for programs that set such an option. The properties of ``Program`` say where an option has an effect;
elsewhere everything is compared.
"""

import collections
import json
import re

from .program import OPTIONS

# Calls before which seed_by seeds the generators.
SEEDED = ("get", "getitems", "collate", "other collate", "stop")


def equalize(program, reference, actual):
    if not program.options:
        return []
    return [text for function in INTENDED for text in function(program, reference, actual) or ()]


def attributes_of_options(program, reference, actual):
    """A loader has attributes for its options, and with seed_by the number of its epochs."""
    extra = {*((*OPTIONS, "_rustloader_options") if program.given == "keyword" else ())}
    extra |= {"_rustloader_epochs"} if program.seed_by else set()
    for event in actual["main"]:
        if event[0] == "the loader has":
            event[1] = [name for name in event[1] if name not in extra]


def worker_of_a_batch(program, reference, actual):
    """Whichever worker is free claims a task from a shared queue: no task is assigned to a worker in advance, and an
    error may name another one. (``who_calls_when`` merges the calls of all workers, which are compared.)"""
    if not program.shares:
        return
    for record in (reference, actual):
        for event in record["main"]:
            if event[0] == "next" and event[2] in ("error", "end"):
                event[3] = _replaced(r"worker process \d+", "some worker process", event[3])
            elif event[0] == "counters":
                event[3:] = [[task for task, _ in event[4]]]


def _replaced(pattern, text, described):
    if isinstance(described, list):
        return [_replaced(pattern, text, part) for part in described]
    return re.sub(pattern, text, described) if isinstance(described, str) else described


def sampler_is_ahead(program, reference, actual):
    """The window decides how many tasks are under way, and so when the sampler is asked; after its end it is not asked
    again. Each walk yields the same indices in the same order; of an abandoned walk, the first ones are compared.
    Only main's thread asks, and never for more than the window has room for."""
    if not program.has_window:
        return []
    violations = []
    for event in actual["main"]:
        if event[0] == "counters" and isinstance(program.reorder_window, int):
            send, received = event[1:3]
            if send - received > program.reorder_window:
                violations.append(f"a window of {program.reorder_window} holds {send - received} batches")
    both = []
    for record in (reference, actual):
        both.append(_walks(record["main"]))
        record["main"] = [
            ["counters", event[2]] if event[0] == "counters" else event
            for event in record["main"]
            if event[0] != "sampler" or len(event) == 2
        ]
    if both[0].keys() != both[1].keys():
        violations.append(f"walks of the sampler: torch {[*both[0]]}, rustloader {[*both[1]]}")
    for number in both[0].keys() & both[1].keys():
        a, b = (walks[number] for walks in both)
        length = min(len(a), len(b)) if program.breaks_off else None
        if a[:length] != b[:length]:
            violations.append(f"walk {number} of the sampler: torch {a}\n  rustloader {b}")
    return violations


def _walks(events):
    """What each walk of a sampler yielded; its end only once."""
    walks = {}
    for event in events:
        if event[0] == "sampler" and len(event) == 4:
            walk = walks.setdefault(event[3], [])
            if not (walk and walk[-1] == event[1:3] and event[1] == "StopIteration"):
                walk.append(event[1:3])
    return walks


def ended_sampler(program, reference, actual):
    """torch asks a sampler again after its end, for each remaining batch. With a shared queue it is asked only once."""
    if not program.shares:
        return
    for record in (reference, actual):
        ended, kept = set(), []
        for event in record["main"]:
            if event[:2] == ["sampler", "StopIteration"]:
                if event[3] in ended:
                    continue
                ended.add(event[3])
            kept.append(event)
        record["main"] = kept


def generators_in_an_epoch(program, reference, actual):
    """A sampler that draws while it is iterated over is at another position in mid-epoch. At the end of the epoch the
    generators have the same states as with torch."""
    if not (program.has_window and program.sampler_draws):
        return
    for record in (reference, actual):
        under_way = False
        for event in record["main"]:
            if event[0] == "iter":
                under_way = True
            elif event[0] == "next" and event[2] == "end":
                under_way = False
            elif event[0] == "rng" and under_way:
                event[1:] = []


def frames_of_torch_fetcher(program, reference, actual):
    """Threads fetch the samples, so the traceback in an error's text shows other lines of torch's fetcher."""
    if not program.has_threads:
        return
    for record in (reference, actual):
        for event in record["main"]:
            # A StopIteration raised by the dataset looks like the end.
            if event[0] == "next" and event[2] in ("error", "end"):
                event[3] = _replaced(r"  fetch\.py .*\n", "", event[3])


def seeds(program, reference, actual):
    """When the dataset and collate_fn are called, the generators have other seeds than with torch. (``seeded.py``
    compares what they draw between runs of rustloader.)"""
    if not program.seed_by:
        return
    for record in (reference, actual):
        for events in (record["main"] if program.num_workers == 0 else (), *record["workers"].values()):
            for event in events:
                # A persistent worker calls iter(dataset) again with the generators as its last batch left them.
                if event[0] in SEEDED or (event[0] == "iter" and program.persistent):
                    event[2] = "seeded"
                elif event[0] == "worker" and program.init == "none":
                    event[1][INITIAL_SEED] = "seeded"


def samples_of_the_next_epoch(program, reference, actual):
    """Workers make samples of the next epoch before it begins, which are unused if it begins otherwise or not at all.
    Their other calls are those of torch's workers, in the same order and with the same states of the generators."""
    if not program.overlaps:
        return
    for name, events in actual["workers"].items():
        wanted = iter(reference["workers"].get(name, []))
        due, kept = next(wanted, None), []
        for event in events:
            if event == due:
                kept.append(event)
                due = next(wanted, None)
        if due is None or ended_early(program, reference["main"]):
            actual["workers"][name] = kept


# The position of torch.initial_seed() in recorder.about().
INITIAL_SEED = -6


def who_calls_when(program, reference, actual):
    """The calls of workers that share a queue are compared together, those of threads in any order. When a sample
    fails, the other threads finish theirs. How much of an abandoned epoch was made is not compared."""
    if not (program.shares or program.has_threads):
        return
    is_partial = ended_early(program, reference["main"])
    both = []
    for record in (reference, actual):
        both.append({})
        for name, events in record["workers"].items():
            if "unknown" in name or not is_partial:
                both[-1].setdefault(_group(program, name), []).extend(_comparable(program, events))
    if program.has_threads:
        for name in both[0].keys() & both[1].keys():
            _remove_samples_after_an_error(program, *(workers[name] for workers in both))
    for record, workers in zip((reference, actual), both, strict=True):
        record["workers"] = {name: sorted(events, key=json.dumps) for name, events in workers.items()}


def _group(program, name):
    any_worker = program.shares or not program.is_ordered
    return f"{name.split('-')[0]}-0" if any_worker and "unknown" not in name else name


def _comparable(program, events):
    """A worker's calls. With a shared queue, they come without the generators' states, which depend on earlier calls,
    and without the first line, which a worker writes only if it gets a task."""
    if not program.shares:
        return events
    calls = [event for event in events if event[0] != "worker" or program.init != "none"]
    return [event if event[0] in ("worker", "init") else [*event[:2], []] for event in calls]


def _remove_samples_after_an_error(program, reference, actual):
    """Removes samples that only rustloader's workers made, at most one for each error and other thread."""
    # Compares without the generators' states: they are the worker's, and another worker may have made the sample.
    more = collections.Counter(json.dumps(e[:2]) for e in actual) - collections.Counter(
        json.dumps(e[:2]) for e in reference
    )
    allowed = (program.worker_threads - 1) * sum(event[0] == "get" and event[1][2] for event in reference)
    for text in [text for text in more.elements() if json.loads(text)[0] == "get"][:allowed]:
        actual.remove(next(event for event in reversed(actual) if event[:2] == json.loads(text)))


def ended_early(program, events):
    """Whether an epoch ended before its last batch, so that timing decides what the workers did beyond it."""
    return program.breaks_off or any(e[0] == "limit" or e[:2] == ["iter", "error"] for e in events)


INTENDED = [
    attributes_of_options,
    worker_of_a_batch,
    sampler_is_ahead,
    ended_sampler,
    generators_in_an_epoch,
    frames_of_torch_fetcher,
    seeds,
    who_calls_when,
    samples_of_the_next_epoch,
]
