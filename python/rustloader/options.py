"""``rustloader.Options``, and the options that ``install()`` has set.

To add an option, add a field to ``Options``. The parameters of ``install()`` and ``installed()``, the syntax of
``RUSTLOADER_INSTALL`` and the flags of ``run`` follow from the fields. scripts/docs_signature.py loads this file by its
path, without torch and the rest of the package.
"""

# No `from __future__ import annotations`: signatures show the types themselves.
import contextlib
import dataclasses
import functools
import inspect
import math
import multiprocessing
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
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
        unset: Values of a loader's attribute that the option overrides: torch's defaults. Empty if loaders have no such
            attribute.
        check: Raises TypeError or ValueError for an invalid (name, value).
        parse: Converts a text of the environment or the command line, or raises ValueError.
        expected: Describes valid texts, as in "must be ...".
        flag: Flag of ``run``.
        metavar: Name of the flag's value in the help; empty for a flag without a value.
        flag_value: Value that a flag without a value sets.
        effective: Converts a value to the loader's attribute.
        keyword: Whether ``rustloader.DataLoader`` has it as a keyword argument, which torch's class has not.
        default: Value in force where neither the loader nor ``install()`` sets one.
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
    keyword: bool = False
    default: Any = None


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _parse_bool(text: str) -> bool:
    if text.lower() not in YES + NO:
        raise ValueError(text)
    return text.lower() in YES


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a positive integer, got {value!r}")
    if value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value}")


def _parse_positive(text: str) -> int:
    if (value := int(text)) <= 0:
        raise ValueError(text)
    return value


def _check_restarts(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a nonnegative integer, got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must be a nonnegative integer, got {value}")


def _parse_restarts(text: str) -> int:
    if (value := int(text)) < 0:
        raise ValueError(text)
    return value


def _check_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a positive number of seconds, got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")


def _parse_seconds(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise ValueError(text)
    return value


_ON_ERROR = ("raise", "skip", "replace")
_ON_ERROR_TEXT = '"raise", "skip", "replace" or a function of (index, exception)'


def _check_on_error(name: str, value: Any) -> None:
    if not isinstance(value, str) and not callable(value):
        raise TypeError(f"{name} must be {_ON_ERROR_TEXT}, got {value!r}")
    if isinstance(value, str) and value not in _ON_ERROR:
        raise ValueError(f"{name} must be {_ON_ERROR_TEXT}, got {value!r}")


def _parse_on_error(text: str) -> str:
    if text.lower() not in _ON_ERROR:
        raise ValueError(text)
    return text.lower()


_ERRORS = "a nonnegative integer, or a fraction of the samples between 0.0 and 1.0"


def _check_errors(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be {_ERRORS}, got {value!r}")
    if not 0 <= value or (isinstance(value, float) and value > 1):
        raise ValueError(f"{name} must be {_ERRORS}, got {value!r}")


def _parse_errors(text: str) -> int | float:
    value: int | float = int(text) if text.isdecimal() else float(text)
    try:
        _check_errors("", value)
    except ValueError:
        raise ValueError(text) from None
    return value


def _check_context(name: str, value: Any) -> None:
    if isinstance(value, str):
        if value not in _METHODS:
            raise ValueError(f"{name} must be a start method of this system ({', '.join(_METHODS)}), got {value!r}")
    elif not isinstance(value, BaseContext):
        raise TypeError(f"{name} must be a context or the name of a start method, got {value!r}")


def _parse_method(text: str) -> str:
    if text.lower() not in _METHODS:
        raise ValueError(text)
    return text.lower()


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmg]i?|)b", re.IGNORECASE)


def byte_size(text: str) -> int:
    """The bytes of a size such as "512MiB" or "1.5 GB". Raises ValueError for other texts and for less than 1."""
    match = _SIZE.fullmatch(text.strip())
    count = float(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not 1 <= count < math.inf:
        raise ValueError(text)
    return int(count)


_WINDOW = 'a positive integer (batches), or a size such as "512MiB"'


def _check_window(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} must be {_WINDOW}, got {value!r}")
    try:
        _parse_window(value) if isinstance(value, str) else _check_positive(name, value)
    except ValueError:
        raise ValueError(f"{name} must be {_WINDOW}, got {value!r}") from None


def _parse_window(text: str) -> int | str:
    with contextlib.suppress(ValueError):
        return _parse_positive(text)
    byte_size(text)
    return text


def window(value: int | str | None) -> dict[str, int]:
    """The parameters of an engine for a ``reorder_window``."""
    if value is None:
        return {}
    parsed = _parse_window(value) if isinstance(value, str) else value
    name, limit = ("window_bytes", byte_size(parsed)) if isinstance(parsed, str) else ("window_batches", parsed)
    return {name: min(limit, sys.maxsize)}  # more than a machine can hold


_AFFINITY = "'spread', or a list with one core, or several, for each worker"


def _check_affinity(name: str, value: Any) -> None:
    text = f"{name} must be {_AFFINITY}, got {value!r}"
    if value == "spread":
        return
    if isinstance(value, str):
        raise ValueError(text)
    if not isinstance(value, list | tuple):
        raise TypeError(text)
    entries = [entry if isinstance(entry, list | tuple | set | frozenset | range) else [entry] for entry in value]
    for core in (core for entry in entries for core in entry):
        if isinstance(core, bool) or not isinstance(core, int):
            raise TypeError(text)
        if core < 0:
            raise ValueError(text)
    if not entries or not all(entries):
        raise ValueError(text)


# More than any machine has cores.
MOST_CORES = 8192


def _parse_affinity(text: str) -> str | list[list[int]]:
    """ "spread", or the cores of each worker, as in "0/1/2-3+6"."""
    if text.lower() == "spread":
        return "spread"
    workers = []
    for worker in text.split("/"):
        ends = [
            (int(first), int(last or first)) for first, _, last in (part.partition("-") for part in worker.split("+"))
        ]
        if any(last >= MOST_CORES for _, last in ends):
            raise ValueError(text)
        workers.append([core for first, last in ends for core in range(first, last + 1)])
    if not all(workers):
        raise ValueError(text)
    return workers


def text_of(value: Any) -> str:
    """A value in the form that its option's ``parse`` takes."""
    if isinstance(value, list):
        return "/".join("+".join(map(str, cores)) for cores in value)
    return str(int(value) if isinstance(value, bool) else value)


def _one_of(*choices: str) -> dict[str, Any]:
    """The checks of an option that is one of several words."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, str):
            raise TypeError(f"{name} must be {expected}, got {value!r}")
        if value not in choices:
            raise ValueError(f"{name} must be {expected}, got {value!r}")

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(text)
        return text.lower()

    expected = " or ".join(", ".join(map(repr, choices)).rsplit(", ", 1))
    return {"check": check, "parse": parse, "expected": expected.replace("'", ""), "default": choices[0]}


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
    num_workers: str | None = _field(
        '"auto" lets the number of workers follow the figures of each loader that asks for workers; loaders with '
        "``num_workers=0`` stay without (default: None, the loader's own number).",
        "let the number of workers follow the figures of each epoch: auto",
        unset=(),
        **_one_of("auto") | {"default": None},
        flag="--num-workers",
        metavar="auto",
    )
    dispatch: str | None = _field(
        'Which worker takes a task: "round_robin", worker i mod N as in torch, or "shared_queue", whichever worker is '
        'free (map-style datasets only; default: None, which means "round_robin").',
        "which worker takes a task: round_robin or shared_queue",
        unset=(None,),
        **_one_of("round_robin", "shared_queue"),
        flag="--dispatch",
        metavar="POLICY",
        keyword=True,
    )
    reorder_window: int | str | None = _field(
        'Limit of the batches that are under way or wait for an older one, or of their bytes, as in "512MiB" (default: '
        "None, which means prefetch_factor x num_workers).",
        'batches, or bytes such as "512MiB", that may be under way or wait for an older one',
        unset=(None,),
        check=_check_window,
        parse=_parse_window,
        expected=_WINDOW.replace('"', ""),
        flag="--reorder-window",
        metavar="SIZE",
        keyword=True,
    )
    seed_by: str | None = _field(
        'What the random numbers of samples depend on: "worker" as in torch, "batch" or "sample" (default: None, which '
        'means "worker").',
        "what random numbers depend on: worker, batch or sample",
        unset=(None,),
        **_one_of("worker", "batch", "sample"),
        flag="--seed-by",
        metavar="UNIT",
        keyword=True,
    )
    worker_threads: int | None = _field(
        "Number of samples of a batch that a worker fetches at a time, for slow storage (map-style datasets only; "
        "default: None, which means 1).",
        "samples of a batch that a worker fetches at a time",
        unset=(None,),
        check=_check_positive,
        parse=_parse_positive,
        expected="a positive integer",
        flag="--worker-threads",
        metavar="N",
        keyword=True,
        default=1,
    )
    max_restarts: int | None = _field(
        "Number of deaths of workers that an epoch survives: a dead worker is started again, and its batches are made "
        "again (default: None, which means 0).",
        "deaths of workers that an epoch survives",
        unset=(None,),
        check=_check_restarts,
        parse=_parse_restarts,
        expected="a nonnegative integer",
        flag="--max-restarts",
        metavar="N",
        keyword=True,
        default=0,
    )
    stall_timeout: float | None = _field(
        "Seconds in one batch after which a worker is killed, and counts as dead (default: None, never).",
        "seconds in one batch after which a worker is killed",
        unset=(None,),
        check=_check_seconds,
        parse=_parse_seconds,
        expected="a positive number of seconds",
        flag="--stall-timeout",
        metavar="SECONDS",
        keyword=True,
    )
    on_error: str | Callable[[Any, Exception], Any] | None = _field(  # noqa: RUF009
        'What an exception of a sample does: "raise" as in torch, "skip" leaves the sample out, "replace" takes '
        "another one. A function gets the index and the exception, and returns a sample or raises (default: None, "
        'which means "raise").',
        "what an exception of a sample does: raise, skip or replace",
        unset=(None,),
        check=_check_on_error,
        parse=_parse_on_error,
        expected="raise, skip or replace",
        flag="--on-error",
        metavar="POLICY",
        keyword=True,
        default="raise",
    )
    max_errors: int | float | None = _field(
        "Number of samples of an epoch that may fail under ``on_error``, or their share of it as a float between 0.0 "
        "and 1.0 (default: None, no limit).",
        "samples of an epoch that may fail, or their share",
        unset=(None,),
        check=_check_errors,
        parse=_parse_errors,
        expected="a nonnegative integer or a fraction",
        flag="--max-errors",
        metavar="N",
        keyword=True,
    )
    worker_affinity: str | Sequence[int | Collection[int]] | None = _field(
        'Cores that each worker runs on: "spread" deals those of this process to the workers, a list has one core, or '
        "several, for each worker (default: None, all cores of this process).",
        "cores of the workers: spread, or those of each worker, as in 0/1/2-3",
        unset=(None,),
        check=_check_affinity,
        parse=_parse_affinity,
        expected="spread or cores such as 0/1/2-3",
        flag="--worker-affinity",
        metavar="CORES",
        keyword=True,
    )
    stateful: bool | None = _field(
        "True puts ``rustloader.StatefulDataLoader`` into ``torchdata.stateful_dataloader``, for frameworks that use "
        "torchdata's (default: None, torchdata's own).",
        "put rustloader.StatefulDataLoader into torchdata.stateful_dataloader",
        unset=(),
        check=_check_bool,
        parse=_parse_bool,
        expected="1 or 0",
        flag="--stateful",
        flag_value=True,
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


def keywords() -> list[str]:
    """The options that are keyword arguments of ``rustloader.DataLoader``."""
    return [name for name in Options.__dataclass_fields__ if option_of(name).keyword]


def check_without_workers(given: dict[str, Any], num_workers: int) -> None:
    """Raises ValueError for an option that a loader without workers cannot keep."""
    if num_workers:
        return
    for name, cannot in (("max_restarts", "start it again"), ("stall_timeout", "kill it")):
        if given.get(name):
            raise ValueError(
                f"{name}={given[name]} needs workers: with num_workers=0 the samples are made in the program's own "
                f"process, and nothing can {cannot}; set num_workers to 1 or more, or leave {name} out"
            )


# Attribute of a loader: the names of the options that its constructor was given. Programs have attributes and methods
# of these names of their own.
GIVEN = "_rustloader_options"


def of_loader(loader: Any, name: str) -> Any:
    """The value of an option that a loader's constructor was given, or None."""
    given = getattr(loader, GIVEN, ())
    return getattr(loader, name, None) if type(given) is tuple and name in given else None


def give(loader: Any, values: dict[str, Any]) -> None:
    """Sets options of a loader as its constructor does."""
    for name, value in values.items():
        setattr(loader, name, value)
    if values:
        setattr(loader, GIVEN, tuple(dict.fromkeys((*getattr(loader, GIVEN, ()), *values))))


def in_force(loader: Any, name: str) -> Any:
    """The value of an option for a loader of any class. Raises as ``Options`` does for a value that the program has
    set there."""
    option = option_of(name)
    value = of_loader(loader, name)
    if value is None:
        return option.default
    option.check(name, value)
    return value


def type_of(name: str) -> Any:
    """The annotation of an option."""
    return Options.__dataclass_fields__[name].type


def with_fields(docstring: str | None, heading: str, names: Iterable[str] | None = None) -> str | None:
    """Inserts a section that describes the fields (default: all) into a docstring, before the returns or errors."""
    if docstring is None:  # python -OO
        return None
    at = re.search(r"^( *)(?:Returns|Raises):$", docstring, re.MULTILINE)
    place = at.start() if at else len(docstring)
    # Python 3.13 and later strip the indentation.
    indent = at[1] if at else ""
    names = Options.__dataclass_fields__ if names is None else names
    entries = [f"{name}: {option_of(name).text}" for name in names]
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
        own = inspect.signature(function, eval_str=True)
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
