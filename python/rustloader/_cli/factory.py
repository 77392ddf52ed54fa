"""Loaders of the user's own: ``module:function`` or ``file.py:function``."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["Unusable", "find", "make"]


class Unusable(Exception):
    """A factory that gives no loader. The text says why and what would do."""


def find(target: str) -> Callable[[], Any]:
    """The function that a target names.

    Raises:
        Unusable: there is none.
    """
    place, colon, name = target.rpartition(":")
    if not (colon and place and name):
        raise Unusable(f"{target!r} names no function; write module:function or file.py:function")
    is_file = place.endswith(".py") or os.sep in place
    module = _file(place) if is_file else _module(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, vars(found) if hasattr(found, "__dict__") else [])
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise Unusable(f"{place} has no {name!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise Unusable(f"{target} is a {type(found).__name__}, not a function that returns a DataLoader")
    return found


def make(factory: Callable[[], Any], target: str, workers: int | None = None) -> Any:
    """A loader.

    Args:
        factory: what ``find`` has found.
        target: its name.
        workers: the num_workers that the loader gets; None: that which it has, which must not be 0.

    Raises:
        Unusable: the factory fails, or returns no loader with workers.
    """
    from torch.utils.data import DataLoader

    try:
        loader = factory()
    except Exception as error:
        raise Unusable(f"{_user_traceback(error)}{target} failed; it is called without arguments") from None
    if not isinstance(loader, DataLoader):
        hint = ""
        if loader is None:
            hint = "; is a `return` missing?"
        elif isinstance(loader, (tuple, list, dict)):
            hint = "; let it return one of its loaders"
        raise Unusable(f"{target} returned a {type(loader).__name__}, not a torch.utils.data.DataLoader{hint}")
    if workers is not None:
        _set_workers(loader, workers)
    elif loader.num_workers == 0:
        raise Unusable(f"the loader of {target} has num_workers=0, which is torch's own loop; give it workers")
    return loader


def _set_workers(loader: Any, workers: int) -> None:
    """Has a loader make its next iterator with so many workers, as if it had been made with them."""
    loader.num_workers = workers
    if workers == 0:
        loader.timeout = 0  # torch's own loop takes no other
    elif loader.prefetch_factor is None:
        loader.prefetch_factor = 2


def _module(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise Unusable(f"there is no module {error.name!r}, neither here ({os.getcwd()}) nor installed") from None
        raise Unusable(f"{_user_traceback(error)}the import of {name} failed") from None
    except Exception as error:
        raise Unusable(f"{_user_traceback(error)}the import of {name} failed") from None


def _file(path: str) -> Any:
    if not os.path.isfile(path):
        raise Unusable(f"there is no file {path}")
    folder, file = os.path.split(os.path.abspath(path))
    name = os.path.splitext(file)[0]
    if name in sys.modules or "." in name:
        raise Unusable(f"{path} cannot be imported by the name {name!r}; give the file another one")
    # By its name, so that workers that are spawned can import it as well.
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Unusable(f"{_user_traceback(error)}the import of {path} failed") from None


def _user_traceback(error: BaseException) -> str:
    """A traceback from the user's first frame on."""
    trace = error.__traceback__
    while trace is not None and _is_machinery(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)) + "\n"


def _is_machinery(file: str) -> bool:
    return file in (__file__, importlib.__file__) or file.startswith("<frozen importlib")
