"""Imports into multiprocessing's fork server the modules that every worker needs, so that no worker has to import them.

The server is a fresh interpreter. In some versions of Python it receives the program's ``sys.path`` but does not use
it. This module uses that path for its imports, as a worker would, and imports nothing if the path is unknown.
"""

from __future__ import annotations

import importlib
import os
import sys
from multiprocessing import forkserver
from types import FrameType

from rustloader.system.forks import at_fork

_MODULES = ("faulthandler", "numpy", "numpy.random", "torch", "torch.utils.data", "rustloader.workers.main")


def _path_of_program() -> list[str] | None:
    """Returns the program's ``sys.path``, which the server's main function received; None in any other process."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not forkserver.main.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("sys_path")


def _import_all(path: list[str]) -> None:
    server_path, sys.path = sys.path, list(path)
    try:
        for name in _MODULES:
            # A worker repeats a failed import and shows its error.
            try:
                importlib.import_module(name)
            except Exception:
                return
    finally:
        sys.path = server_path


def _seed_workers(server: int) -> None:
    """Reseeds NumPy's generator in each process that the server forks, so that it is random there, as in a fresh
    interpreter. Python reseeds its generator itself, and torch's generator starts from the same seed in every
    process."""

    def after_fork() -> None:
        if os.getppid() == server:
            sys.modules["numpy.random"].seed()

    at_fork("numpy", after_in_child=after_fork)


if (_path := _path_of_program()) is not None:
    _import_all(_path)
    if "numpy.random" in sys.modules:
        _seed_workers(os.getpid())
