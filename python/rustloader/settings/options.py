"""``rustloader.Options``, and the options that ``install()`` has set.

To add an option, add a field with its kind to ``Options``, and a field to ``LoaderConfig``. The parameters of
``install()`` and ``installed()``, the syntax of ``RUSTLOADER_INSTALL`` and the flags of ``run`` are derived from the
fields of ``Options``.
"""

# No `from __future__ import annotations`, so that annotations in signatures are types and not strings.
import dataclasses
import functools
import inspect
import multiprocessing
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from multiprocessing.context import BaseContext
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import rustloader.settings.loader_state as loader_state
from rustloader.settings.option_values import (
    Bool,
    Choice,
    Cores,
    Count,
    Failures,
    Kind,
    Name,
    Policy,
    Positive,
    Seconds,
    Size,
    StartMethod,
)
from rustloader.system.protocols import LoaderLike
from rustloader.system.similar import suggest

# torch's default for a loader with workers.
PREFETCH_FACTOR = 2

# The words that options take, for type checkers and for the checks of values.
StartMethodName = Literal["fork", "forkserver", "spawn"]
Dispatch = Literal["round_robin", "shared_queue"]
SeedBy = Literal["worker", "batch", "sample"]
OnError = Literal["raise", "skip", "replace"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class Option:
    """The metadata of a field of ``Options``.

    Attributes:
        text: The option's description in docstrings.
        help: The option's description in the help of the command ``run``.
        unset: The values of a loader's attribute that an installed option replaces: torch's defaults. Empty if the
            option replaces no attribute.
        kind: The kind of values, which checks them and parses them from strings.
        flag: The option's flag in the command ``run``.
        metavar: The name of the flag's value in the help; empty for a flag that takes no value.
        flag_value: The value of the option that a flag without a value sets.
        effective: A function that converts a value of the option to the value of the loader's attribute.
        keyword: Whether the option is a keyword argument of ``rustloader.DataLoader`` that torch's class does not have.
        default: The value that applies if neither the loader nor ``install()`` sets one.
        warns_if_lost: Whether a warning is logged if the loader runs on torch's own iterator, which ignores the option.
            True for an option without which the loader may deliver different batches, or end early.
        needs_workers: A verb phrase that completes "there is no worker to ..." in the error for a loader without
            workers; empty if the option also works without workers.
        needs_persistent: Whether the option works only with persistent workers.
        not_iterable: Why the option cannot be used with an iterable dataset, and the way out: the end of the error.
            Empty if it can.
    """

    text: str
    help: str
    unset: tuple[Any, ...]
    kind: Kind
    flag: str
    metavar: str = ""
    flag_value: Any = None
    effective: Callable[[Any], Any] = lambda value: value
    keyword: bool = False
    default: Any = None
    warns_if_lost: bool = False
    needs_workers: str = ""
    needs_persistent: bool = False
    not_iterable: str = ""


def _context(value: Any) -> Any:
    return multiprocessing.get_context(value) if isinstance(value, str) else value


def _field(*args: Any, **kw: Any) -> Any:
    return dataclasses.field(default=None, metadata={"option": Option(*args, **kw)})


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Options:
    """Options of loaders. The fields are the keyword arguments of ``rustloader.install()``.

    None leaves loaders unchanged. Any other value applies to all loaders that have torch's default for the option.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option has an invalid value.

    Examples:
        >>> rustloader.Options(prefetch_factor=4)
        rustloader.Options(prefetch_factor=4)
    """

    in_order: bool | None = _field(
        "False delivers batches as soon as they are ready (default: None, the loader's own setting).",
        "deliver batches as soon as they are ready (in_order=False)",
        unset=(True,),
        kind=Bool(),
        flag="--out-of-order",
        flag_value=False,
    )
    prefetch_factor: int | None = _field(
        "Number of batches that each worker prepares ahead, 1 or more (default: None, the loader's own).",
        "batches that each worker prepares ahead",
        unset=(None, PREFETCH_FACTOR),
        kind=Positive(),
        flag="--prefetch-factor",
        metavar="N",
    )
    persistent_workers: bool | None = _field(
        "True keeps workers from epoch to epoch; the loader keeps the attribute even after ``uninstall()`` (default: "
        "None, the loader's own).",
        "keep the workers from epoch to epoch",
        unset=(False,),
        kind=Bool(),
        flag="--persistent-workers",
        flag_value=True,
    )
    multiprocessing_context: StartMethodName | BaseContext | None = _field(  # noqa: RUF009
        'How workers are started: "fork", "forkserver", "spawn", or a context of ``multiprocessing`` (default: None, '
        "the loader's own).",
        "how workers are started: fork, forkserver or spawn",
        unset=(None,),
        kind=StartMethod(),
        flag="--multiprocessing-context",
        metavar="METHOD",
        effective=_context,
    )
    num_workers: Literal["auto"] | None = _field(
        '"auto" adapts the number of workers of each loader to measurements of its epochs; a loader with '
        "``num_workers=0`` still has no workers (default: None, the loader's own number).",
        "auto adapts the number of workers to measurements of each epoch",
        unset=(),
        kind=Choice("auto"),
        flag="--num-workers",
        metavar="auto",
    )
    dispatch: Dispatch | None = _field(  # noqa: RUF009
        'Which worker takes task i: "round_robin", worker i mod N as in torch, or "shared_queue", the first free '
        'worker (map-style datasets only; default: None, which means "round_robin").',
        "which worker takes a task: round_robin or shared_queue",
        unset=(None,),
        kind=Choice(*get_args(Dispatch)),
        default="round_robin",
        flag="--dispatch",
        metavar="POLICY",
        keyword=True,
    )
    reorder_window: int | str | None = _field(
        "Limit on the batches that are outstanding or wait for an earlier one: their number, or their size such as "
        '"512MiB" (default: None, which means prefetch_factor x num_workers).',
        'maximum number or size (such as "512MiB") of batches that are outstanding or wait for an earlier one',
        unset=(None,),
        kind=Size(),
        flag="--reorder-window",
        metavar="SIZE",
        keyword=True,
    )
    seed_by: SeedBy | None = _field(  # noqa: RUF009
        'What the random numbers of samples depend on: "worker" as in torch, "batch" or "sample" (default: None, which '
        'means "worker").',
        "what random numbers depend on: worker, batch or sample",
        unset=(None,),
        kind=Choice(*get_args(SeedBy)),
        default="worker",
        flag="--seed-by",
        metavar="UNIT",
        keyword=True,
        warns_if_lost=True,
    )
    worker_threads: int | None = _field(
        "Number of samples of a batch that a worker fetches concurrently, for slow storage (map-style datasets only; "
        "default: None, which means 1).",
        "samples of a batch that a worker fetches concurrently",
        unset=(None,),
        kind=Positive(),
        flag="--worker-threads",
        metavar="N",
        keyword=True,
        default=1,
        not_iterable="whose samples come one after another; leave worker_threads at 1 and set a larger num_workers",
    )
    max_restarts: int | None = _field(
        "Number of worker deaths that an epoch survives: a dead worker is restarted, and its batches are made again "
        "(default: None, which means 0).",
        "worker deaths that an epoch survives",
        unset=(None,),
        kind=Count(),
        flag="--max-restarts",
        metavar="N",
        keyword=True,
        default=0,
        warns_if_lost=True,
        needs_workers="restart",
    )
    stall_timeout: float | None = _field(
        "Seconds that a worker may take for a batch before the worker is killed and counts as dead (default: None, no "
        "limit).",
        "seconds that a worker may take for a batch before the worker is killed",
        unset=(None,),
        kind=Seconds(),
        flag="--stall-timeout",
        metavar="SECONDS",
        keyword=True,
        warns_if_lost=True,
        needs_workers="kill",
    )
    on_error: OnError | Callable[[Any, Exception], Any] | None = _field(  # noqa: RUF009
        'What happens if a sample raises an exception: "raise" raises it as in torch, "skip" omits the sample, '
        '"replace" uses another sample. A function gets the index and the exception, and returns a sample or raises '
        '(default: None, which means "raise").',
        "what happens if a sample raises an exception: raise, skip or replace",
        unset=(None,),
        kind=Policy(*get_args(OnError), signature="(index, exception)"),
        flag="--on-error",
        metavar="POLICY",
        keyword=True,
        default="raise",
        warns_if_lost=True,
    )
    max_errors: int | float | None = _field(
        "Number of samples of an epoch that may fail under ``on_error``, or the fraction of its samples as a float "
        "between 0.0 and 1.0 (default: None, no limit).",
        "number or fraction of an epoch's samples that may fail",
        unset=(None,),
        kind=Failures(),
        flag="--max-errors",
        metavar="N",
        keyword=True,
        warns_if_lost=True,
    )
    worker_affinity: Literal["spread"] | Sequence[int | Collection[int]] | None = _field(
        'Cores on which each worker runs: "spread" divides the cores of this process among the workers; a list has one '
        "or more cores for each worker (default: None, all cores of this process).",
        "cores of the workers: spread, or the cores of each worker, as in 0/1/2-3",
        unset=(None,),
        kind=Cores(),
        flag="--worker-affinity",
        metavar="CORES",
        keyword=True,
    )
    name: str | None = _field(
        "Name of the loader in statistics, metrics, ``top`` and the log (default: None, which means the file and the "
        "line that created it).",
        "name of the loaders in statistics, metrics and the log",
        unset=(None,),
        kind=Name(),
        flag="--name",
        metavar="NAME",
        keyword=True,
    )
    overlap_epochs: bool | None = _field(
        "True lets persistent workers begin the next epoch while the program uses the last batches of the current one "
        "(map-style datasets and torch's samplers only; default: None, which means False).",
        "let persistent workers begin the next epoch before the current one has ended",
        unset=(None,),
        kind=Bool(),
        flag="--overlap-epochs",
        flag_value=True,
        keyword=True,
        default=False,
        needs_workers="begin the next epoch early",
        needs_persistent=True,
        not_iterable="whose next epoch begins with iter(dataset); leave overlap_epochs out",
    )
    stateful: bool | None = _field(
        "True puts ``rustloader.StatefulDataLoader`` into ``torchdata.stateful_dataloader``, for frameworks that use "
        "torchdata's (default: None, torchdata's own).",
        "put rustloader.StatefulDataLoader into torchdata.stateful_dataloader",
        unset=(),
        kind=Bool(),
        flag="--stateful",
        flag_value=True,
    )

    def __post_init__(self) -> None:
        for name, value in _set_values(self).items():
            option_of(name).kind.check(name, value)

    def __repr__(self) -> str:
        return f"rustloader.Options({', '.join(f'{name}={value!r}' for name, value in _set_values(self).items())})"


def _set_values(options: Options) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in Options.__dataclass_fields__}
    return {name: value for name, value in values.items() if value is not None}


def option_of(name: str) -> Option:
    """Returns the metadata of an option. Raises KeyError if there is no such option."""
    option: Option = Options.__dataclass_fields__[name].metadata["option"]
    return option


def keywords() -> list[str]:
    """Returns the names of the options that are keyword arguments of ``rustloader.DataLoader``, but not of torch's."""
    return [name for name in Options.__dataclass_fields__ if option_of(name).keyword]


def check_workers(given: dict[str, Any], num_workers: int, persistent: bool) -> None:
    """Raises ValueError if an option needs workers or persistent workers, and the loader has none.

    Args:
        given: The options that were given to the loader, by name.
        num_workers: The loader's number of workers.
        persistent: Whether the loader has ``persistent_workers=True``.
    """
    persistent = persistent or current().get("persistent_workers", False)
    for name, value in given.items():
        option = option_of(name)
        action = option.needs_workers
        if num_workers and option.needs_persistent and value and not persistent:
            raise ValueError(
                f"{name}={value} needs persistent workers: other workers end with their epoch and cannot {action}; "
                f"set persistent_workers=True, or omit {name}"
            )
        if not num_workers and action and value:
            raise ValueError(
                f"{name}={value} needs workers: with num_workers=0 the program's own process makes the samples, and "
                f"there is no worker to {action}; set num_workers to 1 or more, or omit {name}"
            )


def check_iterable(loader: LoaderLike) -> None:
    """Raises ValueError if an option of a loader with an iterable dataset needs a map-style one. Ignores the options of
    ``install()``, which have no effect there."""
    for name in keywords():
        option = option_of(name)
        if option.not_iterable and (value := in_force(loader, name)) != option.default:
            raise ValueError(
                f"{name} needs a map-style dataset, got {value} for an iterable one, {option.not_iterable}"
            )


def in_force(loader: LoaderLike, name: str) -> Any:
    """Returns the value that an option has for a loader of any class: the loader's own, or the default. Ignores the
    options of ``install()``. If the program has set the attribute to an invalid value, raises the error that
    ``Options`` raises.
    """
    option = option_of(name)
    value = loader_state.given(loader, name)
    if value is None:
        return option.default
    option.kind.check(name, value)
    return value


def type_of(name: str) -> Any:
    """Returns the type annotation of an option's field."""
    return Options.__dataclass_fields__[name].type


def with_fields(docstring: str | None, heading: str, names: Iterable[str] | None = None) -> str | None:
    """Inserts a section that describes options into a docstring, before its sections "Returns" and "Raises". ``names``
    are the options' names; None stands for all options.
    """
    if docstring is None:  # python -OO
        return None
    match = re.search(r"^( *)(?:Returns|Raises):$", docstring, re.MULTILINE)
    position = match.start() if match else len(docstring)
    # Python 3.13 and later strip the indentation of docstrings.
    indent = match[1] if match else ""
    names = Options.__dataclass_fields__ if names is None else names
    entries = [f"{name}: {option_of(name).text}" for name in names]
    lines = [f"{indent}{heading}"]
    for entry in entries:
        lines += textwrap.wrap(entry, 120, initial_indent=f"{indent}    ", subsequent_indent=f"{indent}        ")
    return docstring[:position] + ("" if match else "\n\n") + "\n".join([*lines, "", docstring[position:]])


Options.__doc__ = with_fields(Options.__doc__, "Attributes:")
Options.__module__ = "rustloader"

_current = Options()


def current() -> dict[str, Any]:
    """Returns the options that ``install()`` has set, by name."""
    return _set_values(_current)


def replace(values: dict[str, Any]) -> None:
    """Replaces all options that ``install()`` has set."""
    global _current
    _current = Options(**values)


def add(values: dict[str, Any]) -> None:
    """Adds to the options that ``install()`` has set. A value of None leaves an option unchanged. Raises the same
    errors as ``Options``."""
    replace(current() | {name: value for name, value in values.items() if value is not None})


def takes(options: Callable[_P, Options]) -> Callable[[Callable[[dict[str, Any]], _R]], Callable[_P, _R]]:
    """Decorates a function that takes a dict of options, so that its callers pass the options as keyword arguments.

    Type checkers and ``inspect.signature`` see the parameters of ``options``, and the docstring describes them.
    """

    def decorate(function: Callable[[dict[str, Any]], _R]) -> Any:
        own = inspect.signature(function, eval_str=True)
        signature = inspect.signature(options).replace(return_annotation=own.return_annotation)

        @functools.wraps(function)
        def call(**values: Any) -> _R:
            for name in values.keys() - signature.parameters.keys():
                error = TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")
                suggest(error, [name], signature.parameters)
                raise error
            return function(values)

        call.__doc__ = with_fields(function.__doc__, "Args:")
        call.__signature__ = signature  # type: ignore[attr-defined]
        annotations = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        call.__annotations__ = annotations | {"return": own.return_annotation}
        return call

    return decorate
