"""The intended differences, each with its reason and as narrow as possible. Everything else is a bug.

Each function changes the two records so that they are equal where a difference is intended, and only there. If an
intended difference has rules of its own, the function returns a text for each violation.
"""

import re

from . import describe


def equalize(program, reference, actual):
    return [text for function in INTENDED for text in function(program, reference, actual) or ()]


def _items(events):
    return [e for e in events if e[0] == "next"]


def first_error_of_a_worker_repeated(program, reference, actual):
    """After an error in worker_init_fn, or in the first iter(dataset), torch's worker answers every later task with an
    UnboundLocalError about its own variable; rustloader repeats the original error (T24 in docs/parity.md)."""
    if program.error_in not in ("init", "iter"):
        return
    originals = {}
    for event in _items(reference["main"]):
        match = event[2] == "error" and re.search(r"Caught (\w+) (in DataLoader worker process \d+)", event[3][1])
        if match and match[1] == "UnboundLocalError" and "'fetcher'" in event[3][1]:
            event[3] = originals.get((event[1], match[2]), event[3])
        elif match:
            originals[event[1], match[2]] = event[3]


def views_without_holes(program, reference, actual):
    """A view with holes may arrive compact, in the same order of dimensions: sending a few rows of a large tensor must
    not send all of it (`STORAGE_WASTE` in src/config.rs). roundtrip/intended.py says which views may."""
    if program.is_ordered and program.error_in != "sampler":
        pairs = zip(_items(reference["main"]), _items(actual["main"]), strict=False)
    else:
        pairs = ((event, event) for record in (reference, actual) for event in _items(record["main"]))
    for a, b in pairs:
        if a[2] == b[2] == "value":
            without_holes(a[3], b[3])


def without_holes(a, b):
    """Makes such views equal in two batches, as described by describe.value()."""
    for path in a.keys() & b.keys():
        x, y = a[path], b[path]
        if "stride" in x and x.get("shape") == y.get("shape"):
            compact = describe.compact(x["shape"], x["stride"])
            if y["stride"] in (x["stride"], compact):
                x["stride"] = y["stride"] = compact


def no_batch_lost_by_an_error_of_the_sampler(program, reference, actual):
    """The sampler is asked for one more index before a batch is returned. If it raises then, torch's loader loses
    the batch, and keeps one task fewer in flight for the rest of the epoch; rustloader returns the batch, raises at
    the next call, and asks for the index again (T24 in docs/parity.md).

    Everything up to that point is compared. In the rest of the epoch torch's batches must be among rustloader's, in the
    same order, with the same errors. Later epochs are left out, because the sampler's random draws have shifted.
    """
    if program.error_in != "sampler" or not program.num_workers:
        return []
    at = next((k for k, e in enumerate(reference["main"]) if _is_sampler_error(reference["main"], k)), None)
    if at is None:
        return []
    both, number = [], reference["main"][at][1]
    for record in (reference, actual):
        tail = record["main"][at:]
        end = next((k for k, e in enumerate(tail) if e[0] == "opened" and e[1] == number), len(tail))
        both.append([e[2:] for e in tail[:end] if e[0] == "next" and e[1] == number])
        opened = [e for e in record["main"][:at] if e[0] == "opened"]
        record["main"] = [*record["main"][:at], ["limit"]]
        record["workers"] = {k: v for k, v in record["workers"].items() if int(k.split("-")[0]) <= opened[-1][2]}
    items = [[o for o in outcomes if _is_item(o)] for outcomes in both]
    errors = [[o for o in outcomes if o[0] == "error" and not _is_item(o)] for outcomes in both]
    ended = ["end", []] in both[1]
    rest = iter(items[1])
    lost = next((k for k, item in enumerate(items[0]) if item not in rest), None)
    if lost is not None and ended:
        return [f"item {lost} after an error of the sampler is not among rustloader's: {items[0][lost]}"]
    if any(a != b for a, b in zip(*errors, strict=False)) or (ended and len(errors[0]) > len(errors[1])):
        return [f"errors, starting with the sampler's first\n  torch: {errors[0]}\n  rustloader: {errors[1]}"]
    return []


def _is_item(outcome):
    return outcome[0] == "value" or (outcome[0] == "error" and "DataLoader worker process" in outcome[1][1])


def _is_sampler_error(events, k):
    """Whether event `k` is a `next` of torch's loader that failed with the sampler's error."""
    sampler_failed = events[k - 1][0] == "sampler" and events[k - 1][1] not in ("next", "iter", "len", "StopIteration")
    return sampler_failed and events[k][0] == "next" and events[k][2] == "error"


def _mask_views(described):
    """Masks in a batch, as described by describe.value(), which tensors are views, and which arrays have gaps."""
    for facts in described.values():
        if "is a view" in facts:
            facts["is a view"] = "a view or not"
        if "strides" in facts and "False, True" not in facts["contiguous"]:
            facts |= dict.fromkeys(("strides", "contiguous"), "with gaps or not")


# The position of the dataset's class in recorder.about().
CLASS_OF_DATASET = 3
# The line in a traceback in which torch's fetcher calls collate_fn.
TORCHS_COLLATE = "  fetch.py fetch: return self.collate_fn(data)\n"


def samples_that_are_cached(program, reference, actual):
    """A cache asks the dataset for most samples once, and for a few twice. (The batches are compared.) Workers see the
    cache's class, and a worker of a later epoch that makes no calls records nothing. A tensor or array that was a view
    arrives with memory of its own. The traceback of collate_fn lacks torch's fetcher, which did not call it."""
    if not program.cache:
        return
    for record in (reference, actual):
        for events in (record["main"], *record["workers"].values()):
            events[:] = [event for event in events if event[0] not in ("get", "getitems")]
            for event in events:
                if event[0] == "worker":
                    event[1][CLASS_OF_DATASET] = "cached"
                elif event[0] == "next" and event[2] == "error":
                    event[3] = [part.replace(TORCHS_COLLATE, "") if type(part) is str else part for part in event[3]]
                elif event[0] == "next" and program.num_workers == 0:
                    _mask_views(event[3])
        if program.init == "none":
            for name in [name for name in record["workers"] if not name.startswith("1-")]:
                events = record["workers"][name]
                events[:] = [event for event in events if event[0] != "worker"]
                if not events:
                    del record["workers"][name]


def workers_of_a_dropped_iterator_are_gone(program, reference, actual):
    """torch's StopIteration from a worker refers to the iterator, which then lives until a garbage collection."""
    if program.error != "StopIteration":
        return
    dropped = ([event for event in record["main"] if event[0] == "dropped"] for record in (reference, actual))
    for event, own in zip(*dropped, strict=False):
        event[1] = [is_alive and is_own for is_alive, is_own in zip(event[1], own[1], strict=True)]


INTENDED = [
    workers_of_a_dropped_iterator_are_gone,
    samples_that_are_cached,
    views_without_holes,
    first_error_of_a_worker_repeated,
    no_batch_lost_by_an_error_of_the_sampler,
]
