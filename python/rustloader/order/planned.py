"""Batch samplers for sequences, whose order follows from a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rustloader.order.base import Begun, Order
from rustloader.sequences.base import Batches, SequenceBatchSampler


class Planned(Order):
    """The order of a batch sampler for sequences. Its start is that of ``SequenceBatchSampler``."""

    name = "planned"
    title = "batch sampler for sequences"
    describes_state = True
    sampler_class = SequenceBatchSampler
    code = SequenceBatchSampler.__iter__.__code__

    def resume(self, start: Mapping[str, Any] | None, owes_draws: bool, position: int) -> int:
        super().resume(start, owes_draws, position)
        if self.given is not None:
            self._warn_of_epoch()
            self.given, position = self.inner.resumed(self.given, position)
        return position

    def _first(self, torch_iterator: Iterator[Any] | None) -> Begun:
        start = self.inner.start() if self.given is None else self.given
        return Batches(self.inner, start, self.skip), start

    def __iter__(self) -> Iterator[Any]:
        return self.begun()[0]

    def entries(self) -> dict[str, Any]:
        # The number of batches depends on the number of ranks, which may change. `check_start` compares the rest.
        return {"kind": self.name}

    def check_start(self, start: Mapping[str, Any]) -> None:
        self.inner.check(start)

    def place(self) -> tuple[int, int]:
        return self.inner.place()

    def check_position(self, start: Any, position: int, loader: Any) -> None:
        """Raises ValueError if the batches that the ranks have delivered may not be those before the position.

        A position past the end of the plan is its end.
        """
        if not loader.in_order:
            self.check_place(start)
