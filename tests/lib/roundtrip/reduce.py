"""Shrinks a failing description."""

from forked_runs import shrink

__all__ = ["prune", "reduced"]


def prune(steps):
    """The steps that the last one needs, renumbered."""

    def tied_to(i):
        while steps[i][0] == "tie":
            i = steps[i][1][0]
        return i

    needed = {len(steps) - 1}
    for i in range(len(steps) - 1, -1, -1):
        # What is tied to a needed container must stay, even if no other step needs it.
        if i in needed or (steps[i][0] == "tie" and tied_to(i) in needed):
            needed.update([i, *steps[i][1]])
    numbers = {old: new for new, old in enumerate(sorted(needed))}
    kept = (steps[i] for i in sorted(needed))
    return tuple((op, tuple(numbers[p] for p in parts), *rest) for op, parts, *rest in kept)


def reduced(description, fails):
    """A smaller description for which `fails` is still true."""
    tried = set()

    def untried(steps):
        for candidate in smaller(steps):
            if candidate not in tried and len(tried) < 1000:
                tried.add(candidate)
                yield candidate

    return shrink(description, True, untried, fails)[0]


def smaller(steps):
    """Slightly simpler descriptions, those that lose most first."""
    for i in range(1, len(steps)):
        yield prune(steps[:i])
    for i, (operation, parts, *rest) in enumerate(steps):
        for k in range(len(parts)):
            for many in (2, 1):  # a key and its value, or one
                yield prune(change(steps, i, (operation, parts[:k] + parts[k + many :], *rest)))
    for i, (_, parts, *_) in enumerate(steps):
        # Replaces a step by one of its parts, or by None.
        for part in parts:
            yield prune(tuple((op, tuple(part if p == i else p for p in ps), *rest) for op, ps, *rest in steps))
        if i < len(steps) - 1:
            yield prune(change(steps, i, ("atom", (), "None")))
    for i, (operation, parts, *rest) in enumerate(steps):
        for k, argument in enumerate(rest):
            for simpler in simpler_arguments(argument):
                yield change(steps, i, (operation, parts, *rest[:k], simpler, *rest[k + 1 :]))


def change(steps, i, step):
    return (*steps[:i], step, *steps[i + 1 :])


def simpler_arguments(argument):
    if isinstance(argument, int) and argument > 0:
        yield from {0, argument // 2, argument - 1}
    if isinstance(argument, tuple):
        for i, part in enumerate(argument):
            yield argument[:i] + argument[i + 1 :]
            for simpler in simpler_arguments(part):
                yield (*argument[:i], simpler, *argument[i + 1 :])
