"""Measures the cost of a trace and of metrics: `make compare KIND=observed`.

Each round runs epochs for about --seconds without either, with `rustloader.trace`, and with `serve_metrics`, scraped
once a second. The last two columns are the rates with a trace and with metrics, each divided by the rate without
either. The time to write the trace file after the epochs does not count.
"""

import contextlib
import math
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from epochs import Loop, loop
from harness.program import Program, main
from harness.report import us
from rows import BY_NAME, ROWS

import rustloader
from rustloader.tools.harness.rounds import spread

# Seconds between two scrapes; Prometheus usually waits 15 to 60.
EVERY = 1.0


@contextlib.contextmanager
def traced() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, rustloader.trace(Path(folder, "run.json.gz")):
        yield


@contextlib.contextmanager
def scraped() -> Iterator[None]:
    with contextlib.closing(rustloader.serve_metrics(0)) as server:
        has_ended = threading.Event()

        def scrape() -> None:
            while not has_ended.wait(EVERY):
                urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics").read()

        thread = threading.Thread(target=scrape)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()


OBSERVERS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "off": contextlib.nullcontext,
    "trace": traced,
    "metrics": scraped,
}


def microseconds(side_loop: Loop, observer: str) -> float:
    """Returns the wall time per batch in microseconds, with an observer."""
    with OBSERVERS[observer]():
        return side_loop()["wall"]


def measure(name: str) -> None:
    row = BY_NAME[name]
    side_loop = loop(row, "rustloader", persistent_workers=True)
    side_loop()
    side_loop.epochs = math.ceil(program.options.seconds * 1e6 / (side_loop()["wall"] * side_loop.batches))
    rounds = program.interleave({side: lambda side=side: microseconds(side_loop, side) for side in OBSERVERS}, name)
    rates = {side: rounds.ratios("off", side) for side in ("trace", "metrics")}
    cells = [spread(ratios, "{:.3f}".format) for ratios in rates.values()]
    program.line(name, row.what, us(rounds.median("off")), *cells, rounds=rounds)


program = Program(__doc__, [row.name for row in ROWS if not row.to_first], rounds=9)
program.option("--seconds", type=float, default=2.0, help="duration of each measurement (default: %(default)g)")

if __name__ == "__main__":
    main(program, measure, "batch", "time per batch", "rate with a trace", "with metrics")
