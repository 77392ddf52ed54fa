"""Calls a user's factory, ``module:function`` or ``file.py:function``, and checks the loader that it returns."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rustloader.settings.options import PREFETCH_FACTOR
from rustloader.tools.probe.failure import Failure, failure

if TYPE_CHECKING:
    from torch.utils.data import DataLoader as AnyLoader

# Advice for a factory that returns the wrong kind of object, by an attribute that identifies the object.
_REMEDIES = {
    "train_dataloader": "return its train_dataloader()",
    "get_train_dataloader": "return its get_train_dataloader()",
    "setup_dataloaders": "return the DataLoader that you pass to setup_dataloaders()",
    "prepare_data_loader": "return the DataLoader that you pass to prepare()",
}

_SCRIPT = '\n  put the code of the script under `if __name__ == "__main__":`'


class Unusable(Exception):
    """Raised if there is nothing to compare or to measure.

    Args:
        cause: the reason, with the remedy.
        details: further information, such as a traceback; printed only with ``--verbose``.
    """

    def __init__(self, cause: str, details: str = "") -> None:
        super().__init__(cause, details)
        self.details = details

    def __str__(self) -> str:
        return str(self.args[0])

    def message(self, verbose: bool) -> str:
        """Returns the cause; if there are details, also the details or a note that ``--verbose`` prints them."""
        if not self.details:
            return str(self)
        return f"{self}\n\n{self.details}" if verbose else f"{self}\n  --verbose prints the whole traceback"


def check_target(target: str) -> tuple[str, str, bool]:
    """Checks the form of a target without importing it and, if it names a file, that the file exists.

    Returns the module or file, the function's name, and True for a file. Raises ``Unusable`` if a check fails.
    """
    place, colon, name = target.rpartition(":")
    if not (colon and place and name):
        raise Unusable(f"{target!r} does not name a function; write module:function or file.py:function")
    is_file = place.endswith(".py") or os.sep in place
    if is_file and not os.path.isfile(place):
        hint = f"; did you mean {place}.py?" if os.path.isfile(f"{place}.py") else ""
        raise Unusable(f"there is no file {place}{hint}")
    return place, name, is_file


def find(target: str) -> Callable[[], Any]:
    """Imports and returns the function that a target names. Raises ``Unusable`` if that fails.

    Sets sys.argv to the file or module, without arguments.
    """
    place, name, is_file = check_target(target)
    sys.argv = [place]
    value: Any = _file(place) if is_file else _module(place)
    for part in name.split("."):
        if not hasattr(value, part):
            close = difflib.get_close_matches(part, vars(value) if hasattr(value, "__dict__") else [])
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise Unusable(f"{place} has no {name!r}{hint}")
        value = getattr(value, part)
    if not callable(value):
        kind = type(value).__name__
        raise Unusable(
            f"{target} is {_with_article(kind)}, not a function that returns a DataLoader; write a function that does"
        )
    if missing := _required_parameters(value):
        raise Unusable(
            f"{target} needs arguments ({', '.join(missing)}), but is called without any; "
            "write a function without arguments that calls it"
        )
    return value


def make(factory: Callable[[], Any], target: str, workers: int | None = None, remedy: str = "") -> AnyLoader[Any]:
    """Calls a factory and returns its loader. Raises ``Unusable`` if the call fails or returns an unsuitable object.

    Args:
        factory: the function that ``find`` returned.
        target: its name, for errors.
        workers: the value of num_workers to set; None keeps the factory's value, which must not be 0.
        remedy: an alternative remedy for num_workers=0, to append to the sentence.
    """
    from torch.utils.data import DataLoader

    try:
        loader = factory()
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise _unusable(f"{target} failed", error) from None
    if not isinstance(loader, DataLoader):
        kind = type(loader).__name__
        if inspect.iscoroutine(loader):
            loader.close()
        raise Unusable(f"{target} returned {_with_article(kind)}, not a torch.utils.data.DataLoader{_hint(loader)}")
    if workers is None:
        if loader.num_workers == 0:
            raise Unusable(
                "With `num_workers=0`, torch's own loop runs; there is nothing to accelerate. "
                f"Set num_workers to 1 or more in {target}{remedy}."
            )
        return loader
    loader.num_workers = workers
    if workers == 0:
        loader.timeout = 0  # torch's loop without workers accepts no other value
    elif loader.prefetch_factor is None:
        loader.prefetch_factor = PREFETCH_FACTOR
    return loader


def _unusable(what: str, error: BaseException, advice: str = "") -> Unusable:
    """Returns an ``Unusable`` for an error in the user's code. Appends ``advice`` if the code called sys.exit()."""
    cause = failure(error)
    if isinstance(error, SystemExit):
        cause = Failure(f"it called sys.exit({error.code!r})", cause.where, "")
        return Unusable(f"{what}: {cause}{advice}")
    return Unusable(f"{what}: {cause}", cause.details)


def _required_parameters(function: Any) -> list[str]:
    """Returns the names of the required parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []  # unknown; if there are any, the call will fail
    return [
        it.name for it in parameters if it.default is it.empty and it.kind not in (it.VAR_POSITIONAL, it.VAR_KEYWORD)
    ]


def _with_article(kind: str) -> str:
    """Returns a type's name with its article."""
    return "None" if kind == "NoneType" else f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def _hint(returned: Any) -> str:
    """Returns advice for a factory that returned the wrong kind of object, as a continuation of the sentence."""
    from torch.utils.data import Dataset
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    if returned is None:
        return "; is a `return` missing?"
    for types_, remedy in (
        ((tuple, list, dict), "return one of its loaders"),
        (types.GeneratorType, "use `return`, not `yield`"),
        (types.CoroutineType, "write `def`, not `async def`"),
        (_BaseDataLoaderIter, "return the loader, not iter(loader)"),
        (Dataset, "wrap it in a DataLoader"),
    ):
        if isinstance(returned, types_):
            return f"; {remedy}"
    for name, remedy in _REMEDIES.items():
        # Does not use hasattr, which runs properties and __getattr__.
        if inspect.getattr_static(returned, name, None) is not None:
            return f"; {remedy}"
    if "DataLoader" in type(returned).__name__ or "CombinedLoader" in type(returned).__name__:
        return "; return the DataLoader that it wraps"
    return ""


def _module(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return _import(name, name)
    except ModuleNotFoundError as error:
        raise Unusable(f"there is no module {error.name!r} here ({os.getcwd()}), and none is installed") from None


def _file(path: str) -> Any:
    folder, file = os.path.split(os.path.abspath(path))
    name = os.path.splitext(file)[0]
    if name in sys.modules or "." in name:
        raise Unusable(f"{path} cannot be imported under the name {name!r}; rename the file")
    # Imported by name, so that spawned workers can import it, too.
    sys.path.insert(0, folder)
    try:
        module = _import(name, path)
    except ModuleNotFoundError:
        raise Unusable(f"{path} cannot be imported: the file name must end in .py") from None
    module_file = getattr(module, "__file__", None)
    if module_file is None or os.path.realpath(module_file) != os.path.realpath(os.path.join(folder, file)):
        raise Unusable(
            f"{path} cannot be imported under the name {name!r}, which belongs to {module_file or 'a package'}: "
            "rename one"
        )
    return module


def _import(name: str, shown: str) -> Any:
    """Imports a module. Raises ModuleNotFoundError only if the module itself, or a parent package of it, is missing."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise
        raise _unusable(f"importing {shown} failed", error, _SCRIPT) from None
