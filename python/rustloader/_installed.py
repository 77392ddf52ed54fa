"""What ``rustloader.installed()`` returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any, NoReturn

__all__ = ["Installed"]


class Installed(ContextDecorator):
    """A context manager without a truth value: ``if rustloader.installed():`` would always hold."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "rustloader.installed() is a context manager (`with rustloader.installed():`); to ask whether the engine "
            "is installed, call rustloader.is_installed()"
        )
