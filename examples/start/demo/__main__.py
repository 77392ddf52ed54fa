"""Starts the demo: `python examples/start/demo`. The program itself is main.py."""

import os
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the folder that contains the package `demo`
INTERRUPTED = 128 + signal.SIGINT


def run() -> int:
    """Runs the demo, and returns the exit status."""
    try:
        from demo.main import main

        return main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would interrupt the cleanup
        return INTERRUPTED


def interrupt(*_: object) -> None:
    """Raises KeyboardInterrupt, which ends the demo."""
    raise KeyboardInterrupt


def unraisable(args: "sys.UnraisableHookArgs") -> None:
    """Repeats an interrupt that Python ignored because it was raised in `__del__` or in a hook of `os.fork`."""
    if args.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        sys.__unraisablehook__(args)


def watch_for_ctrl_c() -> None:
    """Makes Ctrl-C interrupt only the main process, which then shuts down its workers."""
    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, interrupt)
    sys.unraisablehook = unraisable
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))


if __name__ == "__main__":
    watch_for_ctrl_c()
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
    status = run()
    if status == INTERRUPTED:  # run() has cleaned up loaders and temporary files
        after_echo = "\n" if sys.stdout.isatty() else ""  # a terminal shows ^C
        print(f"{after_echo}Interrupted: no processes and no unfinished files remain.")
    sys.exit(status)
