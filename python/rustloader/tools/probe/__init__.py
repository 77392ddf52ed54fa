"""Runs a user's loader in a process of its own, for ``check`` and ``bench``."""
