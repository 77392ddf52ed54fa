"""What the options beyond torch's change, each with its reason, as narrow as can be: the same as ``intended.py`` for
programs that set one. The properties of ``Program`` say where an option has an effect; elsewhere nothing is left out.
"""

import collections
import json
import re

from .program import OPTIONS

# Calls before which seed_by seeds.
SEEDED = ("get", "getitems", "collate", "other collate", "stop")


def level(program, theirs, ours):
    if not program.options:
        return []
    return [text for function in LIST for text in function(program, theirs, ours) or ()]


def loader_has_its_options(program, theirs, ours):
    """A loader keeps the options that it was given, with their names, and with seed_by the number of its epochs."""
    own = {*((*OPTIONS, "_rustloader_options") if program.given == "keyword" else ())}
    own |= {"_rustloader_epochs"} if program.seed_by else set()
    for event in ours["main"]:
        if event[0] == "the loader has":
            event[1] = [name for name in event[1] if name not in own]


def worker_of_a_batch(program, theirs, ours):
    """Whichever worker is free takes a task of a shared queue: no task has a worker before, and an error may name
    another one. (That the workers did the same together is compared, see ``compare.union``.)"""
    if not program.shares:
        return
    for record in (theirs, ours):
        for event in record["main"]:
            if event[0] == "next" and event[2] in ("error", "end"):
                event[3] = _replaced(r"worker process \d+", "some worker process", event[3])
            elif event[0] == "counters":
                event[3:] = [[task for task, _ in event[4]]]


def _replaced(pattern, text, told):
    if isinstance(told, list):
        return [_replaced(pattern, text, part) for part in told]
    return re.sub(pattern, text, told) if isinstance(told, str) else told


def sampler_is_ahead(program, theirs, ours):
    """The window decides how many tasks are under way, and so when the sampler is asked, and that it is not asked
    again after its end. Each walk gives the same indices in the same order; the first ones of a walk that was left.
    Main's thread asks, and never for more than the window has room for."""
    if not program.has_window:
        return []
    found = []
    for event in ours["main"]:
        if event[0] == "counters" and isinstance(program.reorder_window, int):
            send, received = event[1:3]
            if send - received > program.reorder_window:
                found.append(f"a window of {program.reorder_window} has {send - received} batches")
    both = []
    for record in (theirs, ours):
        both.append(_walks(record["main"]))
        record["main"] = [
            ["counters", event[2]] if event[0] == "counters" else event
            for event in record["main"]
            if event[0] != "sampler" or len(event) == 2
        ]
    if both[0].keys() != both[1].keys():
        found.append(f"walks of the sampler: torch {[*both[0]]}, ours {[*both[1]]}")
    for number in both[0].keys() & both[1].keys():
        a, b = (walks[number] for walks in both)
        length = min(len(a), len(b)) if program.breaks_off else None
        if a[:length] != b[:length]:
            found.append(f"walk {number} of the sampler: torch {a}\n  ours {b}")
    return found


def _walks(events):
    """What each walk of a sampler gave, with its end once."""
    walks = {}
    for event in events:
        if event[0] == "sampler" and len(event) == 4:
            walk = walks.setdefault(event[3], [])
            if not (walk and walk[-1] == event[1:3] and event[1] == "StopIteration"):
                walk.append(event[1:3])
    return walks


def ended_sampler(program, theirs, ours):
    """torch asks a sampler that has ended again for each batch that is left. A shared queue asks until the end."""
    if not program.shares:
        return
    for record in (theirs, ours):
        ended, kept = set(), []
        for event in record["main"]:
            if event[:2] == ["sampler", "StopIteration"]:
                if event[3] in ended:
                    continue
                ended.add(event[3])
            kept.append(event)
        record["main"] = kept


def generators_in_an_epoch(program, theirs, ours):
    """A sampler that draws while it is walked is at another place in the midst of an epoch. At the epoch's end the
    generators are where torch's are."""
    if not (program.has_window and program.sampler_draws):
        return
    for record in (theirs, ours):
        under_way = False
        for event in record["main"]:
            if event[0] == "iter":
                under_way = True
            elif event[0] == "next" and event[2] == "end":
                under_way = False
            elif event[0] == "rng" and under_way:
                event[1:] = []


def frames_of_torchs_fetcher(program, theirs, ours):
    """Threads fetch the samples, so the traceback in an error's text has not the same lines of torch's fetcher."""
    if not program.has_threads:
        return
    for record in (theirs, ours):
        for event in record["main"]:
            # A StopIteration of the dataset looks like the end.
            if event[0] == "next" and event[2] in ("error", "end"):
                event[3] = _replaced(r"  fetch\.py .*\n", "", event[3])


def seeds(program, theirs, ours):
    """Before the dataset and collate_fn work, their generators have other seeds than torch's. (What is drawn then is
    compared with itself, see ``seeded.py``.)"""
    if not program.seed_by:
        return
    for record in (theirs, ours):
        for events in (record["main"] if program.num_workers == 0 else (), *record["workers"].values()):
            for event in events:
                # A persistent worker iterates over its dataset again with what the last batch has left.
                if event[0] in SEEDED or (event[0] == "iter" and program.persistent):
                    event[2] = "seeded"
                elif event[0] == "worker" and program.init == "none":
                    event[1][INITIAL_SEED] = "seeded"


def samples_of_the_next_epoch(program, theirs, ours):
    """Workers make samples of the next epoch before it begins, which are not used if it begins otherwise or not at all.
    What they are asked for besides is what torch's are asked for, in the same order and with the same generators."""
    if not program.overlaps:
        return
    for name, events in ours["workers"].items():
        wanted = iter(theirs["workers"].get(name, []))
        due, kept = next(wanted, None), []
        for event in events:
            if event == due:
                kept.append(event)
                due = next(wanted, None)
        if due is None or was_left(program, theirs["main"]):
            ours["workers"][name] = kept


# Where recorder.about() has torch.initial_seed().
INITIAL_SEED = -6


def who_calls_when(program, theirs, ours):
    """Calls of workers that share a queue are compared together, those of threads in any order. When a sample fails,
    the other threads finish theirs. How much was made of an epoch that was left is not compared."""
    if not (program.shares or program.has_threads):
        return
    left = was_left(program, theirs["main"])
    both = []
    for record in (theirs, ours):
        both.append({})
        for name, events in record["workers"].items():
            if "nobody" in name or not left:
                both[-1].setdefault(_group(program, name), []).extend(_noted(program, events))
    if program.has_threads:
        for name in both[0].keys() & both[1].keys():
            _without_samples_behind_an_error(program, *(workers[name] for workers in both))
    for record, workers in zip((theirs, ours), both, strict=True):
        record["workers"] = {name: sorted(events, key=json.dumps) for name, events in workers.items()}


def _group(program, name):
    any_worker = program.shares or not program.is_ordered
    return f"{name.split('-')[0]}-0" if any_worker and "nobody" not in name else name


def _noted(program, events):
    """A worker's calls. With a shared queue without the states of generators, which depend on the calls before, and
    without a first line that a worker only writes if it gets a task."""
    if not program.shares:
        return events
    calls = [event for event in events if event[0] != "worker" or program.init != "none"]
    return [event if event[0] in ("worker", "init") else [*event[:2], []] for event in calls]


def _without_samples_behind_an_error(program, theirs, ours):
    """Takes samples out that only our workers made, at most one for each other thread and error."""
    # Without the states of the generators: they are the worker's, and another one may have made the sample.
    more = collections.Counter(json.dumps(e[:2]) for e in ours) - collections.Counter(json.dumps(e[:2]) for e in theirs)
    allowed = (program.worker_threads - 1) * sum(event[0] == "get" and event[1][2] for event in theirs)
    for text in [text for text in more.elements() if json.loads(text)[0] == "get"][:allowed]:
        ours.remove(next(event for event in reversed(ours) if event[:2] == json.loads(text)))


def was_left(program, events):
    """Whether an epoch ended before its last batch, so that it is timing what the workers did beyond."""
    return program.breaks_off or any(e[0] == "limit" or e[:2] == ["iter", "error"] for e in events)


LIST = [
    loader_has_its_options,
    worker_of_a_batch,
    sampler_is_ahead,
    ended_sampler,
    generators_in_an_epoch,
    frames_of_torchs_fetcher,
    seeds,
    who_calls_when,
    samples_of_the_next_epoch,
]
