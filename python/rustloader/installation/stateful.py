"""``install(stateful=True)``: puts rustloader's StatefulDataLoader into ``torchdata.stateful_dataloader``."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

from rustloader.installation.replacement import Replacement, full_name, log_level

logger = logging.getLogger("rustloader")

_PACKAGE = "torchdata.stateful_dataloader"
_CLASS = "StatefulDataLoader"
# torchdata's modules, and the modules of rustloader that stand in for them if torchdata is not installed.
_SUBMODULES = {
    f"{_PACKAGE}.sampler": "rustloader.stateful_dataloader.sampler",
    f"{_PACKAGE}.stateful": "rustloader.stateful_dataloader.stateful",
    f"{_PACKAGE}.stateful_dataloader": "rustloader.stateful_dataloader.loader",
}
_replacement: Replacement | None = None
# The modules that were added because torchdata is not installed, by name.
_added: dict[str, types.ModuleType] = {}
_logged = False


def put_in() -> None:
    """Replaces torchdata's class. If torchdata is not installed, adds modules with torchdata's names instead.

    Does nothing if this was already done.

    Raises:
        RuntimeError: The program has replaced torchdata's class, or torchdata cannot be imported.
    """
    if _added or (_replacement and _replacement.in_place):
        return
    try:
        installed = _is_installed()
        package = importlib.import_module(_PACKAGE) if installed else None
    except ImportError as error:
        raise RuntimeError(
            f"{_PACKAGE} cannot be imported ({error}); repair or uninstall torchdata, or omit stateful=True"
        ) from error
    if package is None:
        _add_modules()
    else:
        _replace(package)


def take_out() -> None:
    """Undoes ``put_in``. Does nothing if ``put_in`` was not called."""
    if _replacement is not None:
        _replacement.take_out()
    for name, module in reversed(_added.items()):
        if sys.modules.get(name) is module:
            del sys.modules[name]
        parent, _, child = name.rpartition(".")
        if parent in sys.modules and vars(sys.modules[parent]).get(child) is module:
            delattr(sys.modules[parent], child)
    _added.clear()


def _is_installed() -> bool:
    """Returns True if torchdata is installed and has the package ``torchdata.stateful_dataloader``. Raises ImportError
    if the import of torchdata fails for another reason."""
    try:
        return _PACKAGE in sys.modules or importlib.util.find_spec(_PACKAGE) is not None
    except ModuleNotFoundError as error:
        if error.name not in ("torchdata", _PACKAGE):
            raise
        return False


def _replace(package: types.ModuleType) -> None:
    global _replacement
    own = _own_class()
    if _replacement is None:
        home = importlib.import_module(f"{_PACKAGE}.stateful_dataloader")
        _replacement = Replacement(getattr(home, _CLASS), own, f"torchdata's {_CLASS}")
    present = getattr(package, _CLASS)
    if present is not own and present is not _replacement.original:
        raise RuntimeError(
            f"{_PACKAGE}.{_CLASS} was replaced by {full_name(present)}; "
            "call rustloader.install(stateful=True) before the code that replaces it runs"
        )
    _replacement.put_in(f"torchdata's {_CLASS} is rustloader's")


def _add_modules() -> None:
    global _logged
    package = _new_package(_PACKAGE)
    modules = {"torchdata": _new_package("torchdata"), _PACKAGE: package}
    modules |= {name: importlib.import_module(home) for name, home in _SUBMODULES.items()}
    vars(package).update({_CLASS: _own_class(), "Stateful": modules[f"{_PACKAGE}.stateful"].Stateful})
    vars(package)["__all__"] = ["Stateful", _CLASS]
    for name, module in modules.items():
        if name not in sys.modules:  # an older torchdata, which lacks the package, may be loaded
            sys.modules[name] = _added[name] = module
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
    logger.log(log_level(again=_logged), "torchdata is not installed: %s is rustloader's", _PACKAGE)
    _logged = True


def _new_package(name: str) -> types.ModuleType:
    """Returns a new package that has no files."""
    return importlib.util.module_from_spec(ModuleSpec(name, None, is_package=True))


def _own_class() -> Any:
    """Returns rustloader's class. Its import is deferred until this call, because it takes time and few programs need
    the class."""
    return getattr(importlib.import_module("rustloader.stateful_dataloader.loader"), _CLASS)
