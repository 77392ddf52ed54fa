"""Calls a function after the import of a module."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader


class AfterImport:
    """An import hook that calls a function after the program has imported a module. It never imports the module itself.

    The hook is a finder for that module only, which delegates to the other finders.

    Args:
        name: Full name of the module.
        then: Called once, without arguments, at the end of the import.
    """

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name = name
        self._then = then

    def register(self) -> None:
        """Registers the hook, which then waits for the import."""
        sys.meta_path.insert(0, self)

    @property
    def is_waiting(self) -> bool:
        """True from the call of ``register`` to the end of the import."""
        return self in sys.meta_path

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                break
        else:
            return None
        if spec.loader is not None:
            self._wrap(spec.loader)
        return spec

    def _wrap(self, loader: Loader) -> None:
        """Makes the module's loader call ``then`` after it has executed the module."""
        run = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            del loader.exec_module
            run(module)
            if self.is_waiting:
                sys.meta_path.remove(self)
            self._then()

        loader.exec_module = exec_module  # type: ignore[method-assign]
