"""Follows ``RUSTLOADER_INSTALL``: calls :func:`rustloader.install` once the program has imported torch.

It does not import torch itself: programs may set variables for that import, or never do it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import os
import sys
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from multiprocessing import spawn
from typing import Any

from rustloader.config import INSTALL, parse_install

logger = logging.getLogger("rustloader")

# The import hook that waits for torch; None until the variable takes effect.
_following: _AfterTorch | None = None


def follow(setting: str) -> None:
    """Applies a value of the variable: 1, 0, or options of ``install()``, as in ``prefetch_factor=4,in_order=0``.

    Raises:
        ValueError: The value is none of these.
    """
    global _following
    options = parse_install(setting)
    if options is None:
        return
    if _following is None:
        _following = _AfterTorch(options)
        _children_follow()
        if "torch" not in sys.modules:
            sys.meta_path.insert(0, _following)
    # The command `run` adds options to those of the variable.
    _following.options |= options
    if _following not in sys.meta_path:
        _install(options)


def _install(options: dict[str, Any]) -> None:
    try:
        importlib.import_module("rustloader").install(**options)
    except RuntimeError as error:
        logger.warning("%s has no effect: %s", INSTALL, error)


class _AfterTorch(MetaPathFinder):
    """Finds torch with the other finders, and installs after its import."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                break
        else:
            return None
        if spec.loader is not None:
            self._follow_up(spec.loader)
        return spec

    def _follow_up(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            del loader.exec_module
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _install(self.options)

        loader.exec_module = exec_module


class _Here:
    """Imports this package when unpickled, from the same place."""

    def __reduce__(self) -> Any:
        parent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        return exec, (f"import sys; {parent!r} in sys.path or sys.path.append({parent!r}); import rustloader",)


def _children_follow() -> None:
    """Makes processes that multiprocessing spawns follow the variable. They unpickle the preparation data before they
    import the program's main module."""
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"rustloader": _Here(), **prepare(name)}

    spawn.get_preparation_data = get_preparation_data
