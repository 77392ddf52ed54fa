"""A clean process for each program."""

import functools

import forked_runs

from . import play


def run_all(programs, jobs, limit):
    """Runs programs, `jobs` at a time; yields (program, failure or None) as they end."""
    runs = ((program, functools.partial(play.run, program), limit) for program in programs)
    for program, result, stderr in forked_runs.results(runs, jobs):
        yield program, None if result is None else f"{stderr}\n{result.text}"
