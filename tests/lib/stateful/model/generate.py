"""Generates random programs."""

import random

from .program import DATASETS, SAMPLERS, Program, Settings, changed, why_invalid

# Interrupts come with these samplers only: in the Python code of others, or of a dataset without workers, an interrupt
# would abort what that code does.
INTERRUPTIBLE = ("sequential", "shuffle", "shuffle with generator", "distributed")
WORKERS = (0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 4)
WAYS = ("dict", "json", "pickle", "torch")


def program(seed):
    """The program of a seed."""
    draws = random.Random(f"program {seed}")
    settings = valid(draws, lambda: first_settings(draws))
    # torchdata's RandomSampler draws its seed when it is made. A state before the first `iter()` does not have it.
    saves_first = draws.random() < 0.1 and settings.sampler != "torchdata random"
    steps = [("save", "now", 0)] if saves_first else []
    steps.append(("iter",))
    current = settings
    for _ in range(draws.randint(3, 12)):
        step = next_step(draws, current)
        if step[0] == "resume":
            current = changed(current, step[2])
        steps.append(step)
    steps += [("end",), ("iter",), ("end",)] if draws.random() < 0.5 else [("end",)]
    return Program(settings, tuple(steps), seed)


def valid(draws, make):
    while why_invalid(settings := make()) is not None:
        pass
    return settings


def first_settings(draws):
    dataset = draws.choice(DATASETS) if draws.random() < 0.6 else "map"
    length = draws.choice([0, 1, 2, 5, 8, 9, 13, 16, 20, 30])
    if "map" in dataset:
        sizes = (length, 0, 0, 0)
    else:
        sizes = tuple(draws.choice([0, 1, 2, 3, 5, 8, 12]) for _ in range(4))
    batch_size = draws.choice([None, 1, 1, 2, 3, 4])
    is_map, is_drawing = "map" in dataset, "drawing" in dataset
    has_errors = is_map and not is_drawing and draws.random() < 0.25
    indices = range(max(sizes))
    return Settings(
        dataset=dataset,
        sizes=sizes,
        batch_size=batch_size,
        drop_last=draws.random() < 0.2,
        sampler=draws.choice(SAMPLERS) if is_map and draws.random() < 0.8 else "sequential",
        seed_by="worker" if is_drawing else draws.choice(["worker", "worker", "batch", "sample"]),
        errors=tuple(i for i in indices if draws.random() < 0.1) if has_errors else (),
        slow=tuple(i for i in indices if draws.random() < 0.2) if draws.random() < 0.4 else (),
        **changeable_settings(draws, [0] if is_drawing else WORKERS),
    )


def changeable_settings(draws, choices=WORKERS):
    """Settings that may change from loader to loader."""
    workers = draws.choice(choices)
    prefetch = draws.choice([1, 2, 2, 3])
    persistent = workers > 0 and draws.random() < 0.35
    return {
        "num_workers": workers,
        "dispatch": draws.choice(["round_robin", "round_robin", "shared_queue"]) if workers else "round_robin",
        "reorder_window": draws.choice([None, None, prefetch * workers, 16]) if workers else None,
        "prefetch_factor": prefetch,
        "persistent": persistent,
        "overlap_epochs": persistent and draws.random() < 0.5,
        "every": draws.choice([1, 1, 1, 0, 2, 3, 10]),
        "in_order": draws.random() < 0.8,
    }


def next_step(draws, settings):
    kind = draws.choices(["next", "end", "iter", "save", "resume", "kill", "interrupt"], [34, 9, 5, 24, 22, 2, 4])[0]
    # An interrupt that comes while a sample's error is raised replaces the error.
    uncertain = not settings.num_workers or settings.errors or settings.sampler not in INTERRUPTIBLE
    if kind == "interrupt" and uncertain:
        kind = "next"
    if kind in ("next", "interrupt"):
        return kind, draws.choice([1, 1, 2, 3, 4, 7])
    if kind == "save":
        way = draws.choice(["now", "now", "now", "thread", "handler"])
        return kind, way, draws.choice([0, 0, 0, 1, 2, 3, 8, 9, 10]) if way == "now" else 0
    if kind == "resume":
        if draws.random() < 0.15:
            return kind, draws.choice(WAYS), {}, True
        return kind, draws.choice(WAYS), changes(draws, settings), False
    if kind == "kill":
        return kind, draws.randrange(4)
    return (kind,)


def changes(draws, settings):
    """Changes to the settings of another loader that may load the state."""
    while True:
        own = changeable_settings(draws, [settings.num_workers] if settings.is_bound else WORKERS)
        if draws.random() < 0.3:
            own = {name: own[name] for name in ("every",)}
        result = {name: value for name, value in own.items() if value != getattr(settings, name)}
        if why_invalid(changed(settings, result)) is None:
            return result
