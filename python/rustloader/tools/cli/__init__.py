"""The command line: ``python -m rustloader``, and the script ``rustloader``.

Each command is imported when it is called: ``--help`` and ``run`` stay quick, and ``run`` does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from rustloader.tools.cli.parser import make_parser, script_arguments

__all__ = ["main"]

_MODULES = {"bench": "rustloader.tools.bench.command", "top": "rustloader.tools.top.command"}
# Commands that need Linux, and the message on other systems.
_NO_COMPARISON = "the engine runs on Linux only: there is nothing to compare"
_NO_TRACE = "the engine runs on Linux only: there is nothing to trace"
_LINUX_ONLY = {
    "bench": _NO_COMPARISON,
    "check": _NO_COMPARISON,
    "trace": _NO_TRACE,
    "top": f"the engine of rustloader needs Linux, and this is {sys.platform}",
}
# Errors of a write to stdout.
_UNWRITTEN = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Terminated(BaseException):
    """SIGTERM or SIGHUP; the argument is the signal's number."""


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    command_line = sys.argv[1:] if arguments is None else arguments
    rest: list[str] = []
    if command_line[:1] in (["run"], ["trace"]):
        command_line, rest = script_arguments(command_line)
    if sys.stdout is None:  # closed
        sys.stdout = open(os.devnull, "w")
    parser = make_parser()
    options = parser.parse_args(command_line)
    if options.command is None:
        parser.print_help()
        return 2
    if options.command in _LINUX_ONLY and not sys.platform.startswith("linux"):
        print(f"rustloader {options.command}: {_LINUX_ONLY[options.command]}", file=sys.stderr)
        return 2
    command = importlib.import_module(_MODULES.get(options.command, f"rustloader.tools.cli.{options.command}"))
    if options.command in ("run", "trace"):
        return int(command.main(options, rest))
    try:
        with _terminable():
            status = int(command.main(options))
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\nrustloader {options.command}: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT
    except _Terminated as error:
        print(f"rustloader {options.command}: terminated", file=sys.stderr)
        return 128 + int(error.args[0])
    except OSError as error:
        return _unwritten(options.command, error)
    return status


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise ``_Terminated``, so that a command ends its processes."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise _Terminated(number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, terminate) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _unwritten(command: str, error: OSError) -> int:
    """Returns the exit status if the output cannot be written. Raises any other error again."""
    if error.filename is not None or error.errno not in _UNWRITTEN:
        raise error
    # Python would report the error again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:  # the reader, `head` for example, has closed the pipe
        return 141  # 128 + SIGPIPE, a signal that Windows lacks
    print(f"rustloader {command}: the output cannot be written: {error.strerror}", file=sys.stderr)
    return 1
