"""Shrinks a program that shows a difference, one value at a time."""

import dataclasses

import forked_runs

from . import compare, processes
from .program import Program, why_invalid


def differs(program):
    ((_, *records),) = processes.run_all([program], 2)
    return compare.differences(program, *records)


def shrink(program):
    """A program that still shows a difference, with no single value that can be made simpler, and its differences."""
    differences = differs(program)
    return forked_runs.shrink(program, differences, simpler, differs) if differences else (program, differences)


def simpler(program):
    """Valid programs with one value made simpler: the default, or something smaller."""
    plain = dataclasses.asdict(Program())
    for name, value in dataclasses.asdict(program).items():
        if name in ("seed", "start_method"):
            continue
        for other in smaller(name, value, plain[name]):
            changed = {name: other}
            if name == "error_in" and other == "nowhere":
                changed |= {"error": "none", "error_at": ()}
            if name == "num_workers" and other == 0:
                continue
            candidate = dataclasses.replace(program, **changed)
            if why_invalid(candidate) is None:
                yield candidate


def smaller(name, value, plain):
    """Simpler values, the simplest first. No value is reached twice, so the search ends."""
    if name in ("samples", "error_at"):
        return [(*value[:k], *value[k + 1 :]) for k in range(len(value))] if len(value) > 1 else []
    if isinstance(value, int) and not isinstance(value, bool):
        numbers = [n for n in (plain, 1, value // 2, value - 1) if n is None or 0 <= n < value]
        return list(dict.fromkeys(n for n in numbers if n != 0 or plain == 0))
    return [plain] if value != plain else []
