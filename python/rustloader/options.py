"""``rustloader.Options``, and the options that ``install()`` has set.

To add an option, add a field to ``Options``. The parameters of ``install()`` and ``installed()``, the syntax of
``RUSTLOADER_INSTALL`` and the flags of ``run`` follow from the fields. scripts/docs_signature.py loads this file by its
path, without torch and the rest of the package.
"""

# No `from __future__ import annotations`: signatures show the types themselves.
import dataclasses
import functools
import inspect
import multiprocessing
import re
import textwrap
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any, ParamSpec, TypeVar

# torch's default for a loader with workers.
PREFETCH_FACTOR = 2
# Texts for True and False in the environment.
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_METHODS = multiprocessing.get_all_start_methods()

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class Option:
    """Metadata of a field of ``Options``.

    Attributes:
        text: Description in docstrings.
        help: Description of the flag of ``run``.
        unset: Values of a loader's attribute that the option overrides: torch's defaults.
        check: Raises TypeError or ValueError for an invalid (name, value).
        parse: Converts a text of the environment or the command line, or raises ValueError.
        expected: Describes valid texts, as in "must be ...".
        flag: Flag of ``run``.
        metavar: Name of the flag's value in the help; empty for a flag without a value.
        flag_value: Value that a flag without a value sets.
        effective: Converts a value to the loader's attribute.
    """

    text: str
    help: str
    unset: tuple[Any, ...]
    check: Callable[[str, Any], None]
    parse: Callable[[str], Any]
    expected: str
    flag: str
    metavar: str = ""
    flag_value: Any = None
    effective: Callable[[Any], Any] = lambda value: value


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _parse_bool(text: str) -> bool:
    if text not in YES + NO:
        raise ValueError(text)
    return text in YES


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a positive integer, got {value!r}")
    if value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value}")


def _parse_positive(text: str) -> int:
    if (value := int(text)) <= 0:
        raise ValueError(text)
    return value


def _check_context(name: str, value: Any) -> None:
    if isinstance(value, str):
        if value not in _METHODS:
            raise ValueError(f"{name} must be a start method of this system ({', '.join(_METHODS)}), got {value!r}")
    elif not isinstance(value, BaseContext):
        raise TypeError(f"{name} must be a context or the name of a start method, got {value!r}")


def _parse_method(text: str) -> str:
    if text not in _METHODS:
        raise ValueError(text)
    return text


def _context(value: Any) -> Any:
    return multiprocessing.get_context(value) if isinstance(value, str) else value


def _field(*args: Any, **kw: Any) -> Any:
    return dataclasses.field(default=None, metadata={"option": Option(*args, **kw)})


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Options:
    """Holds options of loaders; its fields are the keyword arguments of ``rustloader.install()``.

    None leaves loaders as they are. Any other value applies to loaders that have torch's default.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option cannot have that value.

    Examples:
        >>> rustloader.Options(prefetch_factor=4)
        rustloader.Options(prefetch_factor=4)
    """

    in_order: bool | None = _field(
        "False delivers batches as they are ready (default: None, the loader's own setting).",
        "deliver batches as they are ready (in_order=False)",
        unset=(True,),
        check=_check_bool,
        parse=_parse_bool,
        expected="1 or 0",
        flag="--out-of-order",
        flag_value=False,
    )
    prefetch_factor: int | None = _field(
        "Number of batches that each worker prepares ahead, 1 or more (default: None, the loader's own).",
        "batches in flight per worker",
        unset=(None, PREFETCH_FACTOR),
        check=_check_positive,
        parse=_parse_positive,
        expected="a positive integer",
        flag="--prefetch-factor",
        metavar="N",
    )
    persistent_workers: bool | None = _field(
        "True keeps workers from epoch to epoch; the loader keeps this attribute for good (default: None, the loader's "
        "own).",
        "keep the workers from epoch to epoch",
        unset=(False,),
        check=_check_bool,
        parse=_parse_bool,
        expected="1 or 0",
        flag="--persistent-workers",
        flag_value=True,
    )
    multiprocessing_context: str | BaseContext | None = _field(  # noqa: RUF009
        'How workers are started: "fork", "forkserver", "spawn", or a context of ``multiprocessing`` (default: None, '
        "the loader's own).",
        "how workers are started: fork, forkserver or spawn",
        unset=(None,),
        check=_check_context,
        parse=_parse_method,
        expected=" or ".join(", ".join(_METHODS).rsplit(", ", 1)),
        flag="--multiprocessing-context",
        metavar="METHOD",
        effective=_context,
    )

    def __post_init__(self) -> None:
        for name, value in _given(self).items():
            option_of(name).check(name, value)

    def __repr__(self) -> str:
        return f"rustloader.Options({', '.join(f'{name}={value!r}' for name, value in _given(self).items())})"


def _given(options: Options) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in Options.__dataclass_fields__}
    return {name: value for name, value in values.items() if value is not None}


def option_of(name: str) -> Option:
    option: Option = Options.__dataclass_fields__[name].metadata["option"]
    return option


def with_fields(docstring: str | None, heading: str) -> str | None:
    """Inserts a section that describes the fields into a docstring, before the returns or errors."""
    if docstring is None:  # python -OO
        return None
    at = re.search(r"^( *)(?:Returns|Raises):$", docstring, re.MULTILINE)
    place = at.start() if at else len(docstring)
    # Python 3.13 and later strip the indentation.
    indent = at[1] if at else ""
    entries = [f"{name}: {option_of(name).text}" for name in Options.__dataclass_fields__]
    lines = [f"{indent}{heading}"]
    for entry in entries:
        lines += textwrap.wrap(entry, 120, initial_indent=f"{indent}    ", subsequent_indent=f"{indent}        ")
    return docstring[:place] + ("" if at else "\n\n") + "\n".join([*lines, "", docstring[place:]])


Options.__doc__ = with_fields(Options.__doc__, "Attributes:")
Options.__module__ = "rustloader"

_current = Options()


def current() -> dict[str, Any]:
    """The current options by name."""
    return _given(_current)


def replace(values: dict[str, Any]) -> None:
    """Replaces all options."""
    global _current
    _current = Options(**values)


def add(values: dict[str, Any]) -> None:
    """Adds to the current options, or raises as ``Options`` does. None leaves an option as it is."""
    replace(current() | {name: value for name, value in values.items() if value is not None})


def takes(options: Callable[_P, Options]) -> Callable[[Callable[[dict[str, Any]], _R]], Callable[_P, _R]]:
    """Decorates a function that takes a dict of options, so that callers pass them as keyword arguments.

    Type checkers and ``inspect.signature`` see the parameters of ``Options``, and the docstring describes them.
    """

    def decorate(function: Callable[[dict[str, Any]], _R]) -> Any:
        own = inspect.signature(function)
        signature = inspect.signature(options).replace(return_annotation=own.return_annotation)

        @functools.wraps(function)
        def call(**values: Any) -> _R:
            for name in values.keys() - signature.parameters.keys():
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")
            return function(values)

        call.__doc__ = with_fields(function.__doc__, "Args:")
        call.__signature__ = signature  # type: ignore[attr-defined]
        kinds = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        call.__annotations__ = kinds | {"return": own.return_annotation}
        return call

    return decorate
