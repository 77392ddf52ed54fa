"""Drivers that inject faults into whole loaders: workers and main processes die, stop or are interrupted; calls fail.

Each driver runs briefly in ``make test``, and at length on its own: see ``make help``.
"""
