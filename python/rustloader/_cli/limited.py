"""A probe with a limit on each wait: a loader that hangs, or a worker that has died, ends the command."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rustloader._cli.factory import Unusable
from rustloader._cli.measure import Order
from rustloader._cli.probe import Probe
from rustloader._cli.workers import UNNOTICED, advice, dead, how, kill, places

__all__ = ["LimitedProbe"]

# Seconds between two looks at the workers.
_BETWEEN = 0.5
_MORE_TIME = "if it is slow and not stuck, pass a larger --timeout"


class LimitedProbe(Probe):
    """A probe that gives up.

    Args:
        order: what the process has to measure.
        timeout: seconds without progress: without a batch, or before the loader has been made.
    """

    def __init__(self, order: Order, timeout: float) -> None:
        super().__init__(order)
        self._timeout = timeout
        self._target = order.target
        self._stacks: int | None = None
        self._workers: dict[int, int] = {}
        self._what = f"{order.target} did not return a loader"

    def answer(self, meanwhile: Callable[[], object] | None = None) -> Any:
        """As a probe's.

        Raises:
            Unusable: also if there is no progress, or if a worker has died and its iterator does not notice.
        """
        progress = due = time.monotonic()
        unnoticed: dict[int, float] = {}

        def look() -> None:
            nonlocal due
            if meanwhile is not None:
                meanwhile()
            now = time.monotonic()
            if now < due:
                return
            due = now + _BETWEEN
            for number, code in dead(self._workers):
                if now - unnoticed.setdefault(number, now) >= UNNOTICED:
                    raise self._died(number, code)
            if now - progress >= self._timeout:
                raise self._hang()

        while True:
            name, value = self._receive(look, 0.02 if meanwhile else 0.2)
            progress = time.monotonic()
            if name == "stacks":
                self._stacks = value
            elif name == "workers":
                self._workers, self._what = value, "no batch came"
            elif name != "progress":
                self._what = "no batch came"
                return value

    def _died(self, number: int, code: int) -> Unusable:
        text = f"worker {number} (pid {self._workers[number]}) {how(code)}"
        kill(self.group)
        return Unusable(f"with {self.engine}'s iterator, {text}\n  {advice(text)}")

    def _hang(self) -> Unusable:
        text = f"with {self.engine}'s iterator, {self._what} within {self._timeout:g} s"
        lines = [text, *places(self.group, self._workers, self._stacks), _MORE_TIME]
        kill(self.group)
        return Unusable("\n  ".join(lines))
