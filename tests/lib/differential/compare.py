"""Compares the records of the two loaders; what is not equal and not intended is a difference."""

import collections
import json
import re

from . import actors, describe, intended, intended_options, play, seeded

NAMES = ("torch's run", "our run", "our other run")


def differences(program, *records):
    """Texts, one for each difference; none when all is as it should be. The records are of ``seeded.runs(program)``."""
    broken = [f"{name}: {r['broken']}" for name, r in zip(NAMES, records, strict=False) if "broken" in r]
    if broken:
        return broken
    if program.start_method == "ray":
        records = [actors.without_process(record) for record in records]
    found = [text for record in records[1:] for text in wrong_in_itself(records[0], record)]
    if program.is_seeded:
        return found + seeded.differences(program, records)
    theirs, ours = (json.loads(json.dumps(r)) for r in records)
    found += intended.level(program, theirs, ours)
    found += intended_options.level(program, theirs, ours)
    found += main(program, theirs["main"], ours["main"])
    return found + workers(program, theirs, ours)


def wrong_in_itself(theirs, ours):
    found = []
    if ours["handed over"]:
        found.append(f"fell back to torch's iterator: {ours['handed over']}")
    if ours["missing"]:
        found.append(f"{ours['missing']} batches did not come from the engine")
    if ours["stderr"] and describe.normal(ours["stderr"]) != describe.normal(theirs["stderr"]):
        found.append(f"stderr: {ours['stderr']}\ntorch's: {theirs['stderr']}")
    return found


def first_difference(theirs, ours):
    """None, or the first place where two lists differ, with what came before."""
    for k in range(max(len(theirs), len(ours))):
        a, b = (events[k] if k < len(events) else "nothing more" for events in (theirs, ours))
        if a != b:
            before = theirs[k - 1] if k else "the start"
            return f"at {k}, after {short(before)}\n{parting(a, b)}"
    return None


def parting(a, b, path=""):
    """Where two values part, and what stands there."""
    if type(a) is type(b) and isinstance(a, (list, dict)) and len(a) == len(b):
        keys = range(len(a)) if isinstance(a, list) else a
        for k in keys:
            if a[k] != (b[k] if isinstance(b, list) else b.get(k)):
                head = short(a[0]) if isinstance(a, list) and isinstance(a[0], str) else ""
                return parting(a[k], b[k], f"{path} {head}[{k}]")
    return f"  at{path}\n  torch: {short(a)}\n  ours:  {short(b)}"


def short(event, limit=800):
    text = json.dumps(event)
    return text if len(text) < limit else text[:limit] + "..."


# Main


def main(program, theirs, ours):
    if program.is_ordered:
        different = first_difference(theirs, ours)
        return [f"main {different}"] if different else []
    different = first_difference(*(skeleton(events) for events in (theirs, ours)))
    if different:
        return [f"main (the order of batches apart) {different}"]
    both = (passes(anonymous(program, events)) for events in (theirs, ours))
    for number, (a, b) in enumerate(zip(*both, strict=True)):
        if a != b and "end" in (kind for _, kind, _ in a):
            lost, more = (list((x - y).elements()) for x, y in ((a, b), (b, a)))
            return [f"pass {number}, in any order\n  torch's alone: {lost[:3]}\n  ours alone: {more[:3]}"]
    return []


def is_item(event):
    return event[0] == "next" and event[2] != "end"


def skeleton(events):
    """Main's events without what is timing when batches come in any order: which batch, which error and so how many
    batches there were to keep, the warnings about the count of batches."""
    timing = ("status", "warning", "counters")
    found = []
    for event in events:
        if is_item(event):
            found.append(event[:2])
        elif event[0] == play.KEPT:
            found.append([event[0], all(event[1])])
        elif event[0] not in timing:
            found.append(event)
    return found


def anonymous(program, events):
    """Which worker has made a batch of a map dataset is timing, too."""
    if not program.is_map:
        return events
    return json.loads(re.sub(r"worker process \d+", "some worker process", json.dumps(events)))


def passes(events):
    """What each pass over the data gave, as multisets; warnings among it."""
    found, open_passes, last = [], {}, None
    for event in events:
        if event[0] == "opened":
            open_passes[event[1]] = collections.Counter()
            found.append(open_passes[event[1]])
        elif event[0] == "next":
            last = event[1]
            open_passes[last][("next", event[2], json.dumps(event[3]))] += 1
        elif event[0] == "warning" and last is not None:
            open_passes[last][("warning", event[1], json.dumps(event[2:]))] += 1
    return found


# Workers


def workers(program, theirs, ours):
    found = []
    left_early = intended_options.was_left(program, theirs["main"])
    names = sorted({*theirs["workers"], *ours["workers"]})
    if any("nobody" in name for name in names):
        found.append(f"calls outside of a worker's loop: {names}")
    if not program.is_ordered and program.is_map:
        return found + ([] if left_early else union(theirs["workers"], ours["workers"]))
    for name in names:
        a, b = (record["workers"].get(name, []) for record in (theirs, ours))
        if left_early:
            least = required(program, theirs["main"], name, names, max(a, b, key=len))
            if min(len(a), len(b)) < least and program.is_ordered:
                found.append(f"worker {name}: {least} calls are behind the batches; torch {len(a)}, ours {len(b)}")
            # In another order of batches it is timing how much a persistent worker does before it is reset; with a
            # window it is another number of tasks.
            same_number = program.is_ordered and not program.has_window
            length = min(len(a), len(b)) if same_number or not program.persistent else 1
            a, b = a[:length], b[:length]
        different = first_difference(a, b)
        if different:
            found.append(f"worker {name} {different}")
    return found


def union(theirs, ours):
    """Map datasets out of order: which worker gets a task is timing, but not what is asked of all together."""

    def calls(record):
        found = {}
        for name, events in record.items():
            asked = found.setdefault(name.split("-")[0], collections.Counter())
            for event in events:
                asked[json.dumps(event if event[0] in ("worker", "init") else event[:2])] += 1
        return found

    a, b = calls(theirs), calls(ours)
    return [] if a == b else [f"calls of all workers together: torch {short(a)}\n  ours {short(b)}"]


def required(program, main_events, name, names, events):
    """The number of a worker's calls that the batches received from it needed: known for its first pass, if each batch
    has as many samples and the program has not set `num_workers` since."""
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
    """The number of calls that `tasks` tasks of `size` samples make."""
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
