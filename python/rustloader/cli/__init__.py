"""The command line: ``python -m rustloader``, and the script ``rustloader``.

Each command is imported when it is called: ``--help`` and ``run`` stay quick, and ``run`` does not import torch.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys

from rustloader.cli.parser import make_parser, script_arguments

__all__ = ["main"]

_MODULES = {"bench": "rustloader.bench.command", "top": "rustloader.top.command"}
# Commands whose modules use what other systems lack, and why they are of no use there.
_NO_COMPARISON = "the engine runs on Linux only: there is nothing to compare"
_LINUX_ONLY = {
    "bench": _NO_COMPARISON,
    "check": _NO_COMPARISON,
    "top": f"the engine of rustloader needs Linux, and this is {sys.platform}",
}
# How the system refuses what is printed.
_UNWRITTEN = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command: its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    rest: list[str] = []
    if given[:1] == ["run"]:
        given, rest = script_arguments(given)
    if sys.stdout is None:  # closed
        sys.stdout = open(os.devnull, "w")
    parser = make_parser()
    options = parser.parse_args(given)
    if options.command is None:
        parser.print_help()
        return 2
    if options.command in _LINUX_ONLY and not sys.platform.startswith("linux"):
        print(f"rustloader {options.command}: {_LINUX_ONLY[options.command]}", file=sys.stderr)
        return 2
    command = importlib.import_module(_MODULES.get(options.command, f"rustloader.cli.{options.command}"))
    if options.command == "run":
        return int(command.main(options, rest))
    from rustloader.cli.signals import Terminated, terminable

    try:
        with terminable():
            status = int(command.main(options))
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\nrustloader {options.command}: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT
    except Terminated as error:
        print(f"rustloader {options.command}: terminated", file=sys.stderr)
        return 128 + int(error.args[0])
    except OSError as error:
        return _unwritten(options.command, error)
    return status


def _unwritten(command: str, error: OSError) -> int:
    """The exit status where the output cannot be written. Any other error is raised again."""
    if error.filename is not None or error.errno not in _UNWRITTEN:
        raise error
    # Python would report it again at its exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:  # the reader, `head` for example, has closed the pipe
        return 141  # 128 + SIGPIPE, a signal that Windows does not have
    print(f"rustloader {command}: the output cannot be written: {error.strerror}", file=sys.stderr)
    return 1
