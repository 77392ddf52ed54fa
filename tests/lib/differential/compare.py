"""Compares the records of the two loaders; whatever is neither equal nor intended is a difference."""

import collections
import json
import re

from . import actors, describe, intended, intended_options, play, seeded

NAMES = ("torch's run", "our run", "our other run")


def differences(program, *records):
    """A text for each difference. The records are those of ``seeded.runs(program)``, in the same order."""
    broken = [f"{name}: {r['broken']}" for name, r in zip(NAMES, records, strict=False) if "broken" in r]
    if broken:
        return broken
    if program.start_method == "ray":
        records = [actors.without_process(record) for record in records]
    texts = [text for record in records[1:] for text in faults_of_run(records[0], record)]
    if program.is_seeded:
        return texts + seeded.differences(program, records)
    reference, actual = (json.loads(json.dumps(r)) for r in records)
    texts += intended.equalize(program, reference, actual)
    texts += intended_options.equalize(program, reference, actual)
    texts += main(program, reference["main"], actual["main"])
    return texts + workers(program, reference, actual)


def faults_of_run(reference, actual):
    faults = []
    if actual["handed over"]:
        faults.append(f"fell back to torch's iterator: {actual['handed over']}")
    if actual["missing"]:
        faults.append(f"{actual['missing']} batches did not come from the engine")
    if actual["stderr"] and describe.normal(actual["stderr"]) != describe.normal(reference["stderr"]):
        faults.append(f"stderr: {actual['stderr']}\ntorch's stderr: {reference['stderr']}")
    return faults


def first_difference(reference, actual):
    """Describes the first difference of two lists, with the element before it; None if they are equal."""
    for k in range(max(len(reference), len(actual))):
        a, b = (events[k] if k < len(events) else "nothing more" for events in (reference, actual))
        if a != b:
            before = reference[k - 1] if k else "the start"
            return f"at {k}, after {short(before)}\n{innermost_difference(a, b)}"
    return None


def innermost_difference(a, b, path=""):
    """Describes the innermost place where two values differ, and what each has there."""
    if type(a) is type(b) and isinstance(a, (list, dict)) and len(a) == len(b):
        keys = range(len(a)) if isinstance(a, list) else a
        for k in keys:
            if a[k] != (b[k] if isinstance(b, list) else b.get(k)):
                head = short(a[0]) if isinstance(a, list) and isinstance(a[0], str) else ""
                return innermost_difference(a[k], b[k], f"{path} {head}[{k}]")
    return f"  at{path}\n  torch: {short(a)}\n  rustloader: {short(b)}"


def short(event, limit=800):
    text = json.dumps(event)
    return text if len(text) < limit else text[:limit] + "..."


# Main


def main(program, reference, actual):
    if program.is_ordered:
        different = first_difference(reference, actual)
        return [f"main {different}"] if different else []
    different = first_difference(*(skeleton(events) for events in (reference, actual)))
    if different:
        return [f"main, ignoring the order of batches, {different}"]
    both = (passes(anonymous(program, events)) for events in (reference, actual))
    for number, (a, b) in enumerate(zip(*both, strict=True)):
        if a != b and "end" in (kind for _, kind, _ in a):
            only_torch, only_rustloader = (list((x - y).elements()) for x, y in ((a, b), (b, a)))
            return [
                f"pass {number}, in any order\n  only torch: {only_torch[:3]}\n  only rustloader: {only_rustloader[:3]}"
            ]
    return []


def is_item(event):
    return event[0] == "next" and event[2] != "end"


def skeleton(events):
    """Main's events without what depends on timing if batches arrive in any order: which batch or error arrives, how
    many batches are kept, and the warnings about the number of batches."""
    depends_on_timing = ("status", "warning", "counters")
    kept = []
    for event in events:
        if is_item(event):
            kept.append(event[:2])
        elif event[0] == play.KEPT:
            kept.append([event[0], all(event[1])])
        elif event[0] not in depends_on_timing:
            kept.append(event)
    return kept


def anonymous(program, events):
    """Masks worker IDs in events of a map dataset: which worker makes a batch depends on timing, too."""
    if not program.is_map:
        return events
    return json.loads(re.sub(r"worker process \d+", "some worker process", json.dumps(events)))


def passes(events):
    """What each pass over the data yielded, as multisets that include warnings."""
    all_passes, open_passes, last = [], {}, None
    for event in events:
        if event[0] == "opened":
            open_passes[event[1]] = collections.Counter()
            all_passes.append(open_passes[event[1]])
        elif event[0] == "next":
            last = event[1]
            open_passes[last][("next", event[2], json.dumps(event[3]))] += 1
        elif event[0] == "warning" and last is not None:
            open_passes[last][("warning", event[1], json.dumps(event[2:]))] += 1
    return all_passes


# Workers


def workers(program, reference, actual):
    texts = []
    is_partial = intended_options.ended_early(program, reference["main"])
    names = sorted({*reference["workers"], *actual["workers"]})
    if any("unknown" in name for name in names):
        texts.append(f"calls outside a worker's loop: {names}")
    if not program.is_ordered and program.is_map:
        return texts + ([] if is_partial else differences_of_all_workers(reference["workers"], actual["workers"]))
    for name in names:
        a, b = (record["workers"].get(name, []) for record in (reference, actual))
        if is_partial:
            least = required(program, reference["main"], name, names, max(a, b, key=len))
            if min(len(a), len(b)) < least and program.is_ordered:
                texts.append(f"worker {name}: its batches need {least} calls; torch {len(a)}, rustloader {len(b)}")
            # If batches arrive in any order, timing decides how much a persistent worker does before it is reset; a
            # window changes the number of tasks.
            same_number = program.is_ordered and not program.has_window
            length = min(len(a), len(b)) if same_number or not program.persistent else 1
            a, b = a[:length], b[:length]
        different = first_difference(a, b)
        if different:
            texts.append(f"worker {name} {different}")
    return texts


def differences_of_all_workers(reference, actual):
    """Compares the calls of all workers together. For a map dataset whose batches arrive in any order, timing decides
    which worker gets a task, but not which calls all workers together get."""

    def calls(record):
        counts = {}
        for name, events in record.items():
            counter = counts.setdefault(name.split("-")[0], collections.Counter())
            for event in events:
                counter[json.dumps(event if event[0] in ("worker", "init") else event[:2])] += 1
        return counts

    a, b = calls(reference), calls(actual)
    return [] if a == b else [f"calls of all workers together: torch {short(a)}\n  rustloader {short(b)}"]


def required(program, main_events, name, names, events):
    """The number of calls that a worker needed for the batches received from it. It is known for the worker's first
    pass, if all batches have the same size and the program has not set `num_workers` since; otherwise 0."""
    sizes = {"list of batches": None, "batch sampler": 3, "array of batches": 2}
    size = sizes.get(program.sampler, program.batch_size or 1)
    if size is None or program.error_in == "sampler" or not program.num_workers:
        return 0
    generation, worker = map(int, name.split("-"))
    if sum(other.startswith(f"{generation}-") for other in names) > program.num_workers:
        return 0
    number = next((e[1] for e in main_events if e[0] == "opened" and e[2] == generation), None)
    received, is_open = 0, False
    for event in main_events:
        if event[0] == "opened" and event[1] == number:
            is_open = event[2] == generation
        received += is_open and event[0] == "next" and event[1] == number and is_item(event)
    tasks = len(range(worker, received, program.num_workers))
    return walk(events, tasks, size) if tasks else 0


def walk(events, tasks, size):
    """The number of calls in the first `tasks` tasks of `size` samples."""
    at = sum(event[0] in ("worker", "init", "iter") for event in events[:3])
    for _ in range(tasks):
        if at < len(events) and events[at][0] == "getitems":
            at += 1
        for _ in range(size):
            if at >= len(events) or events[at][0] != "get":
                at += at < len(events) and events[at][0] == "stop"
                break
            at += 1
            if events[at - 1][1][2]:
                break
        if at < len(events) and "collate" in events[at][0]:
            at += 1
    return at
