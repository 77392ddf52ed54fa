"""Shrinks a program that fails, and prints it as a script."""

import dataclasses

import forked_runs

from . import processes
from .program import Settings, changed, why_invalid

# A failure that depends on timing may need several runs.
TRIES = 4


def failure_of(program, limit):
    for _, failure in processes.run_all([program] * TRIES, 2, limit):
        if failure is not None:
            return failure
    return None


def shrink(program, failure, limit):
    """A program that fails in the same way and that cannot be made simpler, and its failure."""

    def check(candidate):
        found = failure_of(candidate, min(limit, 20.0))
        return found if found is not None and kind(found) == kind(failure) else None

    return forked_runs.shrink(program, failure, lambda program: filter(valid, simpler(program)), check)


def kind(failure):
    """The kind of failure: the type of the error."""
    lines = [line for line in failure.splitlines() if line and not line.startswith((" ", "in step"))]
    return lines[-1].split(":")[0] if lines else ""


def simpler(program):
    """Programs with one step fewer, with fewer batches, or with one setting at its default."""
    steps, settings = program.steps, program.settings
    for number in range(len(steps) - 1, -1, -1):
        yield dataclasses.replace(program, steps=steps[:number] + steps[number + 1 :])
    for number, step in enumerate(steps):
        for other in simpler_steps(step):
            yield dataclasses.replace(program, steps=(*steps[:number], other, *steps[number + 1 :]))
    plain = Settings()
    for field in dataclasses.fields(settings):
        value, default = getattr(settings, field.name), getattr(plain, field.name)
        others = [default] if value != default else []
        if field.name == "sizes":
            others = [tuple(size // 2 for size in value), tuple(max(size - 1, 0) for size in value)]
        for other in others:
            candidate = changed(settings, {field.name: other})
            if value != other:
                yield dataclasses.replace(program, settings=candidate)


def simpler_steps(step):
    if step[0] in ("next", "interrupt") and step[1] > 1:
        yield (step[0], step[1] - 1)
    if step[0] == "save" and step[1:] != ("now", 0):
        yield ("save", "now", 0)
    if step[0] == "resume":
        if step[1] != "dict":
            yield ("resume", "dict", *step[2:])
        for name in step[2]:
            yield (*step[:2], {key: value for key, value in step[2].items() if key != name}, step[3])


def valid(program):
    """Whether such loaders exist, and each may load the state of the one before."""
    settings = program.settings
    for step in (("resume", "dict", {}, False), *program.steps):
        if step[0] == "resume":
            following = changed(settings, step[2])
            bound = settings.is_bound and following.num_workers != settings.num_workers
            if bound or why_invalid(following) is not None:
                return False
            settings = following
        if step[0] == "interrupt" and not settings.num_workers:
            return False
    return True


def script(program):
    """The program as a script."""
    settings = ",\n    ".join(
        f"{field.name}={getattr(program.settings, field.name)!r}" for field in dataclasses.fields(program.settings)
    )
    lines = [
        "# Run it in tests/lib.",
        "from stateful.model import play",
        "from stateful.model.program import Program, Settings",
        "",
        f"settings = Settings(\n    {settings},\n)",
        f"player = play.Player(Program(settings, seed={program.seed}))",
        *(f"player.{step[0]}({', '.join(map(repr, step[1:]))})" for step in program.steps),
    ]
    return "\n".join(lines) + "\n"
