"""Names of loaders: the option ``name``, or the file and line that made the loader."""

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
    """Records the file and the line that make a loader, for its default name. Keeps no frame.

    Args:
        loader: The loader, whose constructor is running.
        frame: The caller of that constructor. Frames of subclass constructors and of this package are skipped.
    """
    while frame is not None and _makes_itself(loader, frame):
        frame = frame.f_back
    if frame is not None:
        loader_state.of(loader).origin = frame.f_code.co_filename, frame.f_lineno


def _makes_itself(loader: LoaderLike, frame: FrameType) -> bool:
    code = frame.f_code
    # `DataLoader[int](...)` is called by the module typing.
    if code.co_filename.startswith(_OWN) or code.co_filename == typing.__file__:
        return True
    if code.co_name != "__init__" or not code.co_argcount:
        return False
    return frame.f_locals.get(code.co_varnames[0]) is loader


def default(loader: LoaderLike) -> str:
    """Returns the name of a loader that was given none: the file and the line that made it, as in "train.py:12".

    The name is the type of the dataset for a copy, for a loader made in a notebook's cell, and for one that a library
    has made from torch's class.
    """
    state = loader_state.find(loader)
    if state is None or state.origin is None or _is_of_cell(state.origin[0]):
        return printable(type(getattr(loader, "dataset", loader)).__qualname__)
    file, line = state.origin
    return printable(f"{os.path.basename(file)}:{line}")


def _is_of_cell(file: str) -> bool:
    """Returns True if a file is a cell of a notebook or of IPython, whose file name changes with its content."""
    return os.path.basename(os.path.dirname(file)).startswith("ipykernel_") or file.startswith("<ipython-input-")


def given(loader: LoaderLike) -> str | None:
    """Returns the name that a loader of any class was given or that ``install()`` has set; None if it has neither."""
    name: str | None = options.in_force(loader, "name") or options.current().get("name")
    return name


def of(loader: LoaderLike) -> str:
    """Returns the name of a loader of any class."""
    return given(loader) or default(loader)


def title(name: str | None) -> str:
    """Returns the title of a loader in log messages, with its name if it was given one."""
    return "a DataLoader" if name is None else f"the DataLoader {name}"
