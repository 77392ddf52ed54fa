"""``trace``: runs a script as ``run`` does, and writes a trace. ``trace merge``: merges several traces into one."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from rustloader.settings.options import Options
from rustloader.system.formatting import count_of
from rustloader.tools.cli import run

if TYPE_CHECKING:
    from rustloader.tracing.core import Trace


def main(options: Any, arguments: list[str]) -> int:
    """Runs the script, or merges traces. Returns 0, or 2 if there is no script, the trace cannot be written, or merging
    fails."""
    if options.script == "merge" and not options.module:
        return _merge(options.output, arguments)
    from rustloader.tracing import core

    for name in Options.__dataclass_fields__:
        setattr(options, name, None)
    program = run.prepare(options, arguments)
    if program is None:
        return 2
    path = options.output or "trace.json.gz"
    trace = core.trace(path, level=options.level, seconds=options.seconds)
    with contextlib.ExitStack() as stack:
        stack.callback(_report, trace)
        try:
            stack.enter_context(trace)
        except OSError as error:
            print(f"rustloader trace: cannot write {path}: {error.strerror}", file=sys.stderr)
            return 2
        print(f"rustloader trace: if the script is killed, run: {trace.merge_command}", file=sys.stderr)
        program()
    return 0


def _report(trace: Trace) -> None:
    if trace.is_written:
        # The log says why a trace is empty.
        what = "open it at https://ui.perfetto.dev" if trace.slices else "it has no slices"
        print(f"rustloader trace: wrote {trace.path}; {what}", file=sys.stderr)


def _merge(output: str | None, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rustloader trace merge", allow_abbrev=False)
    parser.add_argument("files", nargs="+", metavar="FILE", help="a trace from rustloader or torch.profiler")
    parser.add_argument("-o", "--output", default=output, required=output is None, metavar="FILE", help="the result")
    options = parser.parse_args(arguments)
    from rustloader.tracing import files

    try:
        count = files.merge(options.files, options.output)
    except files.NotATrace as error:
        print(f"rustloader trace merge: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        verb = "write" if error.filename == options.output else "read"
        print(f"rustloader trace merge: cannot {verb} {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{options.output}: {count_of(count, 'event')} from {count_of(len(options.files), 'file')}")
    return 0
