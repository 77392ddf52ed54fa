"""Names of loaders: the option ``name``, or the file and line that created the loader."""

from __future__ import annotations

import os
import typing
from types import FrameType

from rustloader.settings import loader_state, options
from rustloader.system.formatting import printable
from rustloader.system.package import FOLDER
from rustloader.system.protocols import LoaderLike

_OWN = FOLDER + os.sep


def note_origin(loader: LoaderLike, frame: FrameType | None) -> None:
    """Records the file and line that create a loader, for its default name. Keeps no reference to a frame.

    Args:
        loader: The loader, whose constructor is running.
        frame: The frame that called the constructor. It and its callers are skipped as long as they belong to the
            constructor of a subclass or to this package.
    """
    while frame is not None and _is_internal(loader, frame):
        frame = frame.f_back
    if frame is not None:
        loader_state.of(loader).origin = frame.f_code.co_filename, frame.f_lineno


def _is_internal(loader: LoaderLike, frame: FrameType) -> bool:
    """Returns True if a frame belongs to a constructor of the loader or to this package."""
    code = frame.f_code
    # In `DataLoader[int](...)`, the module typing makes the call.
    if code.co_filename.startswith(_OWN) or code.co_filename == typing.__file__:
        return True
    if code.co_name != "__init__" or not code.co_argcount:
        return False
    return frame.f_locals.get(code.co_varnames[0]) is loader


def default(loader: LoaderLike) -> str:
    """Returns the name of a loader that was not given one: the file and line that created it, as in "train.py:12".

    For a copy of a loader, a loader created in a notebook cell, and a loader of torch's class, returns the name of the
    dataset's type instead.
    """
    state = loader_state.find(loader)
    if state is None or state.origin is None or _is_of_cell(state.origin[0]):
        return printable(type(getattr(loader, "dataset", loader)).__qualname__)
    file, line = state.origin
    return printable(f"{os.path.basename(file)}:{line}")


def _is_of_cell(file: str) -> bool:
    """Returns True if a file name denotes a cell of a notebook or of IPython. Such a name changes with the content."""
    return os.path.basename(os.path.dirname(file)).startswith("ipykernel_") or file.startswith("<ipython-input-")


def given(loader: LoaderLike) -> str | None:
    """Returns the name that a loader of any class was given, or else the one that ``install()`` has set, or None."""
    name: str | None = options.in_force(loader, "name") or options.current().get("name")
    return name


def of(loader: LoaderLike) -> str:
    """Returns the name of a loader of any class: the given one, or the default."""
    return given(loader) or default(loader)


def title(name: str | None) -> str:
    """Returns the words with which log messages refer to a loader. ``name`` is the name that it was given, or None."""
    return "a DataLoader" if name is None else f"the DataLoader {name}"
