"""Gives access to torch's own iterator class, and makes calls whose warnings come from torch's module."""

from __future__ import annotations

import os
import sys
import types
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader as torch_dataloader

# torch's iterator class, saved before the program can replace it.
TorchIter = torch_dataloader._MultiProcessingDataLoaderIter


class IterType(ABCMeta):
    """The metaclass of the engine's iterator class.

    While ``rustloader.install()`` is in effect, the engine's class stands in for torch's, and torch's iterators count
    as instances of the engine's class. The metaclass is an ABCMeta so that subclasses may have abstract base classes,
    too, as they may with torch's class.

    Attributes:
        stand_in: The class that stands in for torch's class; None while ``install()`` is not in effect.
    """

    stand_in: IterType | None = None

    def __instancecheck__(cls, instance: Any) -> bool:
        # torch's class is a base class of the stand-in, so its instances include those of the stand-in.
        return type.__instancecheck__(TorchIter if cls is IterType.stand_in else cls, instance)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return type.__subclasscheck__(TorchIter if cls is IterType.stand_in else cls, subclass)


def is_defined_in(function: Any, module: types.ModuleType) -> bool:
    """Returns True if a function was defined in ``module``, False if a program has defined it elsewhere."""
    return getattr(function, "__globals__", None) is vars(module)


def known_code(function: Any, module: types.ModuleType, *known: str) -> types.CodeType | None:
    """Returns the code of a function of torch if it is a version that this package reproduces; otherwise None.

    Args:
        function: The function, as found in a class or module of torch. A program may have replaced it.
        module: The module in which torch defines the function.
        known: For each known version of the function, the names that it uses, in the order of their first use and
            separated by spaces.
    """
    code = getattr(function, "__code__", None)
    if code is None or not is_defined_in(function, module):
        return None
    # Python 3.11 compiles each comprehension to a separate code object.
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    names = dict.fromkeys(name for part in (code, *inner) for name in part.co_names)
    return code if " ".join(names) in known else None


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


# Calls a function with arguments, as code of torch's module does. This is for functions that warn with `stacklevel=2`,
# and for `warnings.warn`: such a warning comes from torch's module, by which programs filter warnings.
in_torch = types.FunctionType(_call.__code__, vars(torch_dataloader))


def frames_to_program() -> int:
    """Returns the ``stacklevel`` with which a warning that the caller issues is attributed to the code that called this
    package."""
    # The path comes from a code object, just like the frames' paths: the code may have been compiled elsewhere.
    package = os.path.join(os.path.dirname(os.path.dirname(frames_to_program.__code__.co_filename)), "")
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level


def forget_locals(error: BaseException) -> None:
    """Clears the local variables of the function that the caller has called and that raised ``error``.

    torch's ``ExceptionWrapper.reraise`` keeps the error in a local variable. The cycle of error, traceback and frame
    would otherwise keep the iterator and its workers alive until the garbage collector runs.
    """
    called = error.__traceback__ and error.__traceback__.tb_next
    if called is not None:
        called.tb_frame.clear()
