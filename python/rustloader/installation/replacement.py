"""Replaces a class with another one in all loaded modules."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import weakref
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger("rustloader")


class Replacement:
    """Replaces a class wherever a global name of a loaded module refers to it or to a tuple that contains it. The
    replacement can be undone.

    Args:
        original: The class to replace.
        substitute: The class that replaces it.
        name: Name of the original class in log messages.

    Attributes:
        in_place: Whether the class is currently replaced.
    """

    def __init__(self, original: type, substitute: type, name: str) -> None:
        self.original = original
        self.substitute = substitute
        self.in_place = False
        self._name = name
        # Global names that already referred to the substitute, with their namespaces. `take_out` does not change them.
        self._kept: dict[tuple[int, str], dict[str, Any]] = {}
        # Pairs: a tuple that contains the substitute, and the original tuple that it replaced.
        self._tuples: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
        self._logged = False
        self._warned_of: weakref.WeakSet[type] = weakref.WeakSet()

    def put_in(self, message: str) -> None:
        """Replaces the class, and logs the names that now refer to the substitute. Does nothing if the class is already
        replaced.

        Args:
            message: The beginning of the log message; the names follow it.
        """
        if self.in_place:
            return
        self.in_place = True
        derived = list(_derived(self.original, self.substitute))
        homes = {cls.__module__ for cls in derived} - {self.original.__module__}
        self._kept.update({(id(namespace), key): namespace for _, namespace, key, _ in _references(self.substitute)})
        self._forget_home()
        rebound = []
        for module, namespace, key, value in _references(self.original):
            # Modules that define derived classes are skipped, because the code of these classes may refer to their base
            # class by name, as in `Base.__init__(self)`.
            if module not in homes:
                namespace[key] = self._replaced(value)
                rebound.append(f"{module}.{key}")
        self._log(message, rebound, derived)

    def take_out(self) -> None:
        """Restores the class. Does nothing if it is not replaced."""
        if not self.in_place:
            return
        self.in_place = False
        for _, namespace, key, value in _references(self.substitute):
            if (id(namespace), key) not in self._kept:
                namespace[key] = self._restored(value)
        self._kept.clear()
        self._tuples.clear()

    def _forget_home(self) -> None:
        """Makes ``take_out`` restore the class in the module that defines it, even if the program itself had put the
        substitute there."""
        home = sys.modules.get(self.original.__module__)
        if home is not None:
            self._kept.pop((id(vars(home)), self.original.__name__), None)

    def _replaced(self, value: Any) -> Any:
        if value is self.original:
            return self.substitute
        replaced = tuple(self.substitute if item is self.original else item for item in value)
        self._tuples.append((replaced, value))
        return replaced

    def _restored(self, value: Any) -> Any:
        if value is self.substitute:
            return self.original
        for replaced, original in self._tuples:
            if replaced is value:
                return original
        return tuple(self.original if item is self.substitute else item for item in value)

    def _log(self, message: str, rebound: list[str], derived: list[type]) -> None:
        logger.log(log_level(again=self._logged), "%s; replaced: %s", message, ", ".join(rebound))
        self._logged = True
        for cls in derived:
            if cls not in self._warned_of:
                self._warned_of.add(cls)
                logger.warning(
                    "%s was derived from %s before rustloader.install() and still uses it; call install() before the "
                    "class is defined",
                    full_name(cls),
                    self._name,
                )


def log_level(again: bool) -> int:
    """Returns the log level of a message about an installation: INFO, or DEBUG if this process (``again``) or its
    parent has already logged the message.
    """
    # A spawned process runs the script's top-level code again, and must not repeat the message.
    process = multiprocessing.current_process()
    quiet = again or process.daemon or getattr(process, "_inheriting", False)
    return logging.DEBUG if quiet else logging.INFO


def full_name(cls: type) -> str:
    """Returns the qualified name of a class, including its module."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _references(wanted: type) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Yields the global names of loaded modules that refer to a class or to a tuple that contains it, each as (name of
    the module, its namespace, global name, value). Skips the modules of rustloader."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "rustloader":
            continue
        try:
            # `getattr` would load lazy modules.
            namespace = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        for key, value in list(namespace.items()):
            if value is wanted or (type(value) is tuple and any(item is wanted for item in value)):
                yield module_name, namespace, key, value


def _derived(cls: Any, substitute: type) -> Iterator[type]:
    """Yields all classes that derive from a class, directly or indirectly, except the substitute and its subclasses."""
    for derived in cls.__subclasses__():
        if derived is not substitute:
            yield derived
            yield from _derived(derived, substitute)
