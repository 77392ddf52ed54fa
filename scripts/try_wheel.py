"""Checks that an installed rustloader works. A release runs this program with each of its wheels.

On Linux, the engine must deliver an epoch with each start method; elsewhere, torch's iterator must.
"""

import logging
import multiprocessing
import sys

import rustloader

EXPECTED = [list(range(k, k + 10)) for k in range(0, 100, 10)]


def main() -> None:
    """Raises AssertionError if batches are wrong, or do not come from the expected iterator."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rustloader").addHandler(handler)
    linux = sys.platform.startswith("linux")
    for method in multiprocessing.get_all_start_methods() if linux else ["spawn"]:
        before = rustloader.engine_batches()
        loader = rustloader.DataLoader(range(100), batch_size=10, num_workers=2, multiprocessing_context=method)
        got = [batch.tolist() for batch in loader]
        batches = rustloader.engine_batches() - before
        print(f"rustloader {rustloader.__version__}, {sys.platform}, {method}: {batches} batches from the engine")
        assert got == EXPECTED, got
        assert batches == (10 if linux else 0), batches
    assert len(lines) == (0 if linux else 1), lines


if __name__ == "__main__":
    main()
