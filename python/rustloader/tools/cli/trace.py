"""``trace``: runs a script as ``run`` does, and writes a trace. ``trace merge``: merges several traces into one."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from rustloader.settings.options import Options
from rustloader.system import local_ranks
from rustloader.system.formatting import count_of
from rustloader.tools.cli import run


def main(options: Any, arguments: list[str]) -> int:
    """Runs the script, or merges traces. Returns 0, or 2 if there is no script or merging fails."""
    if options.script == "merge" and not options.module:
        return _merge(options.output, arguments)
    from rustloader.tracing import core

    for name in Options.__dataclass_fields__:
        setattr(options, name, None)
    if not options.module and not os.path.exists(options.script):
        return run.main(options, arguments)  # prints the error
    rank = local_ranks.global_rank()
    path = options.output or ("trace.json.gz" if rank is None else f"trace-rank{rank}.json.gz")
    trace = core.trace(path.replace("{rank}", str(rank or 0)), level=options.level, seconds=options.seconds)
    try:
        with trace:
            status = run.main(options, arguments)
    finally:
        if trace.is_written:
            print(f"rustloader trace: wrote {trace.path}; open it at https://ui.perfetto.dev", file=sys.stderr)
    return status


def _merge(output: str | None, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rustloader trace merge", allow_abbrev=False)
    parser.add_argument("files", nargs="+", metavar="FILE", help="a trace from rustloader or torch.profiler")
    parser.add_argument("-o", "--output", default=output, required=output is None, metavar="FILE", help="the result")
    options = parser.parse_args(arguments)
    from rustloader.tracing import files

    try:
        count = files.merge(options.files, options.output)
    except (files.NotATrace, OSError) as error:
        print(f"rustloader trace merge: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {count_of(count, 'event')} from {count_of(len(options.files), 'file')}")
    return 0
