"""The result of ``rustloader.installed()``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any, NoReturn, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Installed(ContextDecorator):
    """A context manager that has no truth value: ``if rustloader.installed():`` raises TypeError. Otherwise it would
    always be true; the caller most likely means ``is_installed()``.

    Args:
        make: Makes the context manager that each ``with`` statement enters.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)

    def __call__(self, function: _Function) -> _Function:
        """Decorates a function. Raises TypeError for a generator or coroutine function, because its body would run
        after the call, outside the context."""
        checks = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(check(function) for check in checks):
            name = getattr(function, "__qualname__", "the function")
            raise TypeError(
                f"@rustloader.installed() cannot decorate {name}, a generator or coroutine function; "
                "write `with rustloader.installed():` inside it"
            )
        return super().__call__(function)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "rustloader.installed() is a context manager (`with rustloader.installed():`); to check whether the engine "
            "is installed, call rustloader.is_installed()"
        )
