"""Start the demo: `python examples/demo`. The program itself is main.py."""

import os
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the examples: this folder is the package `demo` there


def interrupt(*_: object) -> None:
    """Ends the demo on Ctrl-C. A second one would disturb the cleaning up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def run() -> int:
    """Runs the demo; the exit status."""
    try:
        from demo.main import main

        return main()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupt)
    # Ctrl-C reaches the workers as well, which are the main process's to end.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
    status = run()
    if status == 128 + signal.SIGINT:  # loaders and temporary files went with run()
        after_echo = "\n" if sys.stdout.isatty() else ""  # a terminal shows ^C
        print(f"{after_echo}Interrupted: no process and no unfinished file is left.")
    sys.exit(status)
