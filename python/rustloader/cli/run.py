"""``run``: a script on the Rust engine, otherwise as ``python script`` runs it."""

from __future__ import annotations

import importlib.machinery
import io
import os
import runpy
import sys
import types
from typing import Any

from rustloader.config import INSTALL
from rustloader.environment import follow  # by the package itself it would import torch
from rustloader.options import Options

__all__ = ["main"]


def main(options: Any, arguments: list[str]) -> int:
    """Runs the script to its end."""
    setting = _setting(options)
    # Before the script's path is known to be right, for it may be rustloader that is found beside it.
    _keep_findable()
    module = types.ModuleType("__main__")
    # Which of these a main module has is a matter of Python's version.
    for attribute, value in (("__annotations__", {}), ("__cached__", None)):
        if attribute in vars(sys.modules["__main__"]):
            vars(module)[attribute] = value
    try:
        code, name = (_of_module if options.module else _of_file)(options.script, module)
    except _NoScript as error:
        print(f"rustloader run: {error}", file=sys.stderr)
        return 2
    sys.argv[:] = [name, *arguments]
    os.environ[INSTALL] = setting
    follow(setting)
    sys.modules["__main__"] = module
    _show_no_frames_of_ours(vars(module))
    if isinstance(code, Exception):
        raise code
    exec(code, vars(module))
    return 0


class _NoScript(Exception):
    """There is nothing to run; the text says why."""


def _setting(options: Any) -> str:
    """The environment variable by which this process and those that it spawns install."""
    given = os.environ.get(INSTALL, "").strip()
    parts = [given] if "=" in given else []
    for name in Options.__dataclass_fields__:
        if (value := getattr(options, name)) is not None:
            parts.append(f"{name}={int(value) if isinstance(value, bool) else value}")
    return ",".join(parts) or "1"


def _of_file(path: str, module: types.ModuleType) -> tuple[Any, str]:
    """A script's code, or its error, and sys.argv[0]; module and sys.path[0] become what `python path` makes them."""
    if os.path.isdir(path):
        raise _NoScript(f"{path} is a directory; name a script, or -m and a module")
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
    """The same for `python -m name`."""
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
    """sys.path[0] will be the script's. Workers that are spawned must find this package still."""
    if importlib.machinery.PathFinder.find_spec("rustloader", sys.path[1:]) is None:
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def _show_no_frames_of_ours(namespace: dict[str, Any]) -> None:
    """Tracebacks begin with the script, as they do without us."""
    show = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_globals is not namespace:
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = excepthook
