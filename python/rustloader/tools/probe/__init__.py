"""Runs a user's loader in a separate process, for ``check`` and ``bench``."""
