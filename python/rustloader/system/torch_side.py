"""Gives access to torch's own iterator class and functions, and makes calls that appear to come from torch's module."""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader as torch_dataloader

# torch's iterator class, and the functions from which the calls of `in_torch` appear to come. They are saved before the
# program can replace them.
TorchIter = torch_dataloader._MultiProcessingDataLoaderIter
TORCH_INIT: Any = TorchIter.__init__
TORCH_GET_ITERATOR: Any = torch_dataloader.DataLoader._get_iterator
TORCH_NEXT: Any = torch_dataloader._BaseDataLoaderIter.__next__


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


@functools.cache
def _caller(caller: types.CodeType, name: str) -> Callable[..., Any]:
    """Returns a copy of ``_call`` whose frame appears to be in torch's file and module, at the first line where
    ``caller`` uses ``name``."""
    lines = (it.positions.lineno for it in dis.get_instructions(caller) if it.argval == name and it.positions)
    line = next(filter(None, lines), caller.co_firstlineno)
    code = _call.__code__.replace(
        co_filename=torch_dataloader.__file__,
        co_firstlineno=line - 1,  # the body is one line below
        co_name=caller.co_name,
        co_qualname=caller.co_qualname,
    )
    return types.FunctionType(code, vars(torch_dataloader))


def in_torch(caller: Callable[..., Any], name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function as if a function of torch called it. This is for functions that warn with ``stacklevel=2``: such
    a warning is attributed to the caller's file and line, by which programs filter warnings.

    Args:
        caller: The function in torch's ``dataloader`` module that makes this call in torch.
        name: The name that ``caller`` calls. The call appears to come from the line where the name is first used.
        function: The function to call.
        args: The arguments of ``function``.
    """
    return _caller(getattr(caller, "__code__", _call.__code__), name)(function, *args)


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
