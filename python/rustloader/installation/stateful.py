"""``install(stateful=True)``: puts rustloader's StatefulDataLoader into ``torchdata.stateful_dataloader``."""

from __future__ import annotations

import importlib
from typing import Any

from rustloader.installation.replacement import Replacement, full_name

_PACKAGE = "torchdata.stateful_dataloader"
_CLASS = "StatefulDataLoader"
_replacement: Replacement | None = None


def put_in() -> None:
    """Replaces torchdata's class. Does nothing if this was already done.

    Raises:
        ImportError: torchdata is not installed, or is so old that it has no such class.
        RuntimeError: The program has replaced torchdata's class, or torchdata cannot be imported.
    """
    global _replacement
    if _replacement and _replacement.in_place:
        return
    package = _torchdata()
    own = _own_class()
    if _replacement is None:
        home = importlib.import_module(f"{_PACKAGE}.stateful_dataloader")
        _replacement = Replacement(getattr(home, _CLASS), own, f"torchdata's {_CLASS}")
    present = getattr(package, _CLASS)
    if present is not own and present is not _replacement.original:
        raise RuntimeError(
            f"{_PACKAGE}.{_CLASS} was replaced by {full_name(present)}; "
            "call rustloader.install(stateful=True) before the code that replaces it runs"
        )
    _replacement.put_in(f"torchdata's {_CLASS} is rustloader's")


def take_out() -> None:
    """Undoes ``put_in``. Does nothing if ``put_in`` was not called."""
    if _replacement is not None:
        _replacement.take_out()


def _torchdata() -> Any:
    """Returns torchdata's package, with errors as for ``put_in``."""
    try:
        return importlib.import_module(_PACKAGE)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name in ("torchdata", _PACKAGE):
            raise ImportError(
                f"stateful=True replaces a class of {_PACKAGE}, which is not installed: run `pip install -U "
                "torchdata`, or omit stateful=True and import StatefulDataLoader from rustloader",
                name=error.name,
            ) from error
        raise RuntimeError(
            f"{_PACKAGE} cannot be imported ({error}); repair or uninstall torchdata, or omit stateful=True"
        ) from error


def _own_class() -> Any:
    """Returns rustloader's class. Its import is deferred until this call, because it takes time and few programs need
    the class."""
    return getattr(importlib.import_module("rustloader.stateful_dataloader.loader"), _CLASS)
