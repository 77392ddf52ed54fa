"""The command line: ``python -m rustloader``, and the script ``rustloader``.

Each command is imported only when it is called, so ``--help`` and ``run`` start quickly, and ``run`` does not import
torch.
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

# Modules of commands that are not in this package.
_MODULES = {"bench": "rustloader.tools.bench.command", "top": "rustloader.tools.top.command"}
_NO_COMPARISON = "the engine runs on Linux only: there is nothing to compare"
_NO_TRACE = "the engine runs on Linux only: there is nothing to trace"
# The messages that commands print on systems other than Linux.
_LINUX_ONLY = {
    "bench": _NO_COMPARISON,
    "check": _NO_COMPARISON,
    "trace": _NO_TRACE,
    "top": f"rustloader's engine needs Linux, and this is {sys.platform}",
}
# Error numbers with which a write to stdout may fail.
_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Terminated(BaseException):
    """Raised on SIGTERM or SIGHUP. The argument is the signal number."""


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    command_line = sys.argv[1:] if arguments is None else arguments
    script_args: list[str] = []
    if command_line[:1] in (["run"], ["trace"]):
        command_line, script_args = script_arguments(command_line)
    if sys.stdout is None:  # its descriptor is closed
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
        return int(command.main(options, script_args))
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
        return _output_error_status(options.command, error)
    return status


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise ``_Terminated``, so that a command can shut down the processes that it started."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise _Terminated(number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, terminate) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _output_error_status(command: str, error: OSError) -> int:
    """Returns the exit status for an error from writing to stdout. Re-raises any other error."""
    if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
        raise error
    # Python would report the error again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:  # the reader, `head` for example, has closed the pipe
        return 141  # 128 + SIGPIPE, a signal that Windows lacks
    print(f"rustloader {command}: the output cannot be written: {error.strerror}", file=sys.stderr)
    return 1
