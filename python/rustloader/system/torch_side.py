"""torch's own iterator, saved before a program could replace it, and its functions and place in warnings."""

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

TorchIter = torch_dataloader._MultiProcessingDataLoaderIter
# Functions of torch's that call others, before a program could replace them.
TORCH_INIT: Any = TorchIter.__init__
TORCH_GET_ITERATOR: Any = torch_dataloader.DataLoader._get_iterator
TORCH_NEXT: Any = torch_dataloader._BaseDataLoaderIter.__next__


class IterType(ABCMeta):
    """The metaclass of the engine's iterator class.

    While ``rustloader.install()`` replaces torch's class with it, torch's iterators count as its instances too. It is
    an ABCMeta so that subclasses can have abstract base classes, as with torch's class.
    """

    stand_in: IterType | None = None

    def __instancecheck__(cls, instance: Any) -> bool:
        # torch's class is a base of the stand-in.
        return type.__instancecheck__(TorchIter if cls is IterType.stand_in else cls, instance)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return type.__subclasscheck__(TorchIter if cls is IterType.stand_in else cls, subclass)


def is_defined_in(function: Any, module: types.ModuleType) -> bool:
    """Returns True if a function is defined in a module of torch, and not put there by a program."""
    return getattr(function, "__globals__", None) is vars(module)


def known_code(function: Any, module: types.ModuleType, *known: str) -> types.CodeType | None:
    """Returns the code of a function of torch's, if it is code that this package imitates; else None.

    Args:
        function: Found in a class or module of torch's, where a program may have replaced it.
        module: Module of torch's that defines it.
        known: The names that the function uses, in the order of their first use, in each known version.
    """
    code = getattr(function, "__code__", None)
    if code is None or not is_defined_in(function, module):
        return None
    # Python 3.11 compiles a comprehension to code of its own.
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    names = dict.fromkeys(name for part in (code, *inner) for name in part.co_names)
    return code if " ".join(names) in known else None


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@functools.cache
def _caller(caller: types.CodeType, name: str) -> Callable[..., Any]:
    """Returns ``_call`` from a frame in torch's file and module, at the line where ``caller`` uses ``name``."""
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
    """Calls a function as if a function of torch's did. Warnings with `stacklevel=2` name the file and the line of
    their caller, and programs filter by it.

    Args:
        caller: Function in torch's `dataloader` that makes this call.
        name: The name that it calls there; the first use of the name is the line.
        function: Called in place of that.
        args: Its arguments.
    """
    return _caller(getattr(caller, "__code__", _call.__code__), name)(function, *args)


def frames_to_program() -> int:
    """Returns the `stacklevel` with which a warning of the caller names the code that has called this package."""
    # By the names that code has, which may have been compiled elsewhere.
    package = os.path.join(os.path.dirname(os.path.dirname(frames_to_program.__code__.co_filename)), "")
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level


def forget_locals(error: BaseException) -> None:
    """Clears the local variables of the called function that raised ``error``.

    torch's ``ExceptionWrapper.reraise`` keeps its error in one. This cycle of error, traceback and frame would keep the
    iterator and its workers alive until the garbage collector runs.
    """
    called = error.__traceback__ and error.__traceback__.tb_next
    if called is not None:
        called.tb_frame.clear()
