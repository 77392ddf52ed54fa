"""Faults injected into whole loaders: workers and main processes that end, stop, are interrupted or refused.

Each driver has a short form in ``make test`` and a long one of its own: see ``make help``.
"""
