"""Applies ``RUSTLOADER_INSTALL``: calls :func:`rustloader.install` as soon as the program has imported torch.

This module does not import torch itself, because the program may set environment variables before it imports torch, or
may never import torch.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from multiprocessing import spawn
from typing import Any

from rustloader.settings.option_values import NO, YES
from rustloader.settings.options import Options, option_of
from rustloader.system.after_import import AfterImport
from rustloader.system.package import FOLDER
from rustloader.system.patches import Patch

logger = logging.getLogger("rustloader")

# The environment variable that makes `import rustloader` install the engine.
INSTALL = "RUSTLOADER_INSTALL"

# The import hook that waits for torch; None until `follow` is called with a value that installs the engine.
_following: _AfterTorch | None = None


def follow(setting: str) -> None:
    """Applies a value of the variable: 1, 0, or options of ``install()``, as in ``prefetch_factor=4,in_order=0``. The
    engine is installed now if torch is loaded, otherwise after the import of torch.

    Raises:
        ValueError: The value is none of these.
    """
    global _following
    options = parse_install(setting)
    if options is None:
        return
    if _following is None:
        _following = _AfterTorch(options)
        _follow_in_children()
        if "torch" not in sys.modules:
            _following.register()
            # A program may import torchdata's class first. The module that defines it would then be incomplete at the
            # end of torch's import.
            AfterImport("torchdata", lambda: importlib.import_module("torch")).register()
    # Options of several calls are combined, because the command `run` adds its own to those of the variable.
    _following.options |= options
    if not _following.is_waiting:
        _install(options)


def parse_install(setting: str) -> dict[str, Any] | None:
    """Returns the options of ``install()`` that a value of ``RUSTLOADER_INSTALL`` sets, by name; an empty dict for "1",
    which installs the engine without options. Returns None if the value installs nothing.

    Raises:
        ValueError: The value is neither 1 nor 0 nor a list of options.
    """
    text = setting.strip()
    if text.lower() in ("", *NO):
        return None
    values = {}
    for part in () if text.lower() in YES else text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        name = name.lower()
        try:
            values[name] = option_of(name).kind.parse(value)
        except (KeyError, ValueError):
            known = ", ".join(f"{name} ({option_of(name).kind.expected})" for name in Options.__dataclass_fields__)
            raise ValueError(
                f"{INSTALL} must be 1, 0, or options of rustloader.install(), separated by commas, for example "
                f"prefetch_factor=4,in_order=0; got {setting!r}. The options: {known}"
            ) from None
    return values


def follow_variable() -> None:
    """Applies the variable, which must be set. If its value is invalid and this process runs a command of the package,
    prints a one-line error and exits.

    Raises:
        ValueError: The value is invalid, and this process does not run a command of the package.
    """
    try:
        follow(os.environ[INSTALL])
    except ValueError as error:
        if not _is_command():
            raise
        print(f"rustloader: {error}. Change {INSTALL}, or unset it.", file=sys.stderr)
        raise SystemExit(2) from None


def _is_command() -> bool:
    """Returns True if this process runs ``python -m rustloader`` or the script ``rustloader``."""
    # While Python imports the package of a module that it is about to run, `sys.argv` starts with "-m".
    if sys.argv[:1] != ["-m"]:
        return os.path.basename((sys.argv or [""])[0]) == "rustloader"
    command = " ".join(sys.orig_argv[1:])
    return "-m rustloader" in command or "-mrustloader" in command


def _install(options: dict[str, Any]) -> None:
    install = importlib.import_module("rustloader").install
    try:
        install(**options)
    except (ImportError, RuntimeError) as error:
        logger.warning("%s has no effect: %s", INSTALL, error)


class _AfterTorch(AfterImport):
    """An import hook that installs the engine after the import of torch."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__("torch", lambda: _install(self.options))
        self.options = options


class _Here:
    """An object that, when unpickled, imports this package from the folder that this process uses."""

    def __reduce__(self) -> Any:
        parent = os.path.dirname(FOLDER)
        return exec, (f"import sys; {parent!r} in sys.path or sys.path.append({parent!r}); import rustloader",)


def _follow_in_children() -> None:
    """Makes the processes that multiprocessing spawns apply the variable, too. Adds a `_Here` to their preparation
    data, which a process unpickles before it imports the program's main module."""
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"rustloader": _Here(), **prepare(name)}

    Patch("multiprocessing.spawn.get_preparation_data", spawn).put_in(get_preparation_data)
