"""``run``: runs a script as ``python script`` does, but on the Rust engine."""

from __future__ import annotations

import functools
import importlib.machinery
import io
import os
import runpy
import sys
import types
from collections.abc import Callable
from typing import Any

from rustloader.installation.environment import (
    INSTALL,
    follow,  # not `installation.api`, which imports torch
)
from rustloader.settings.option_values import text_of
from rustloader.settings.options import Options
from rustloader.system.package import FOLDER
from rustloader.system.patches import Patch


def main(options: Any, arguments: list[str]) -> int:
    """Runs the script. Returns 0, or 2 if the script cannot be found or opened."""
    program = prepare(options, arguments)
    if program is None:
        return 2
    program()
    return 0


def prepare(options: Any, arguments: list[str]) -> Callable[[], None] | None:
    """Compiles the script and sets up the process for it. Returns a function that runs the script.

    If the script cannot be found or opened, prints the error and returns None. Raises the error of a script that cannot
    be compiled.
    """
    setting = _setting(options)
    # Must come first, because this package may be in sys.path[0], which the script's folder will replace.
    _keep_findable()
    module = types.ModuleType("__main__")
    # Versions of Python differ in which of these attributes a main module has.
    for attribute, value in (("__annotations__", {}), ("__cached__", None)):
        if attribute in vars(sys.modules["__main__"]):
            vars(module)[attribute] = value
    try:
        code, name = (_of_module if options.module else _of_file)(options.script, module)
    except _NoScript as error:
        print(f"rustloader {options.command}: {error}", file=sys.stderr)
        return None
    sys.argv[:] = [name, *arguments]
    os.environ[INSTALL] = setting
    follow(setting)
    sys.modules["__main__"] = module
    _hide_own_frames(vars(module))
    if isinstance(code, Exception):
        raise code
    return functools.partial(exec, code, vars(module))


class _NoScript(Exception):
    """Raised if there is nothing to run. The message is the reason."""


def _setting(options: Any) -> str:
    """Returns the value of RUSTLOADER_INSTALL for this process and the processes that it spawns."""
    current = os.environ.get(INSTALL, "").strip()
    parts = [current] if "=" in current else []
    for name in Options.__dataclass_fields__:
        if (value := getattr(options, name)) is not None:
            parts.append(f"{name}={text_of(value)}")
    return ",".join(parts) or "1"


def _of_file(path: str, module: types.ModuleType) -> tuple[Any, str]:
    """Returns the compiled code of a script (or the error from compiling it), and the value for sys.argv[0].

    Sets up the module and sys.path[0] as `python path` does.
    """
    if os.path.isdir(path):
        raise _NoScript(f"{path} is a directory; pass a script, or -m and a module")
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        raise _NoScript(f"cannot open {path}: {error.strerror}") from None
    where = os.path.abspath(path)
    module.__file__ = where
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", where)
    module.__package__ = None
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    try:
        return compile(source, where, "exec", dont_inherit=True), path
    except (SyntaxError, ValueError) as error:
        return error, path


def _of_module(name: str, module: types.ModuleType) -> tuple[Any, str]:
    """Returns the compiled code of a module, and the value for sys.argv[0].

    Sets up the module and sys.path[0] as `python -m name` does.
    """
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    try:
        _, spec, code = runpy._get_module_details(name)  # type: ignore[attr-defined]
    except ImportError as error:
        raise _NoScript(f"cannot run module {name}: {error}") from None
    module.__spec__ = spec
    module.__file__ = spec.origin
    module.__loader__ = spec.loader
    module.__package__ = spec.parent
    if "__cached__" in vars(module):
        module.__cached__ = spec.cached  # type: ignore[attr-defined]
    return code, spec.origin


def _keep_findable() -> None:
    """Ensures that spawned workers find this package after the script's folder has replaced sys.path[0]."""
    if importlib.machinery.PathFinder.find_spec("rustloader", sys.path[1:]) is None:
        sys.path.append(os.path.dirname(FOLDER))


def _hide_own_frames(namespace: dict[str, Any]) -> None:
    """Makes tracebacks begin with the script, as with `python script`."""
    show = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_globals is not namespace:
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    Patch("sys.excepthook", sys).put_in(excepthook)
