"""Counts the copies of batches to a device, and describes how they limit a loop."""

import threading
from dataclasses import dataclass, replace

from rustloader.system.figures import figure
from rustloader.system.formatting import duration, size
from rustloader.system.protocols import LoaderLike
from rustloader.system.weak_table import WeakTable


# No `from __future__ import annotations`: field annotations must be types, not strings.
@dataclass(frozen=True)
class TransferStats:
    """The copies that ``prefetch_to_device`` made of the delivered batches.

    Times are measured on the device, with events. They are 0 on a device without streams.

    Attributes:
        batches: Number of batches with a finished copy.
        bytes: Size of these batches on the device in bytes.
        seconds: Time of their copies in seconds.
        waited_seconds: Part of ``seconds`` during which the program's stream had no other work and waited for the copy.
        pageable: The reason why batches are copied from pageable memory, with the remedy; empty if they are pinned.
        note: The reason why batches are not copied but stay on the CPU; empty if they are copied.

    Examples:
        >>> loader = rustloader.DataLoader(range(8), batch_size=4, num_workers=1)
        >>> batches = list(rustloader.prefetch_to_device(loader, "cpu"))
        >>> rustloader.stats(loader).transfers.note
        'the device is the CPU, to which nothing is copied'
    """

    batches: int = 0
    bytes: int = 0
    seconds: float = figure(0.0, "transfer_seconds")
    waited_seconds: float = figure(0.0, "transfer_wait_seconds")
    pageable: str = ""
    note: str = ""

    @property
    def overlapped_share(self) -> float | None:
        """Share of ``seconds`` for which the program's stream did not wait; None before the first measured copy."""
        return 1 - self.waited_seconds / self.seconds if self.seconds else None


_NO_COPIES = "the device is the CPU, to which nothing is copied"

# Pickles and reprs name the package that users import.
TransferStats.__module__ = "rustloader"


class Transfers:
    """The copies of a loader's batches to a device.

    Attributes:
        stats: The counts. The object is replaced at each change, because other threads may read it at any time.
    """

    def __init__(self) -> None:
        self.stats = TransferStats()
        # Two prefetchers of a loader may run in two threads. Reentrant, because a signal handler may run a prefetcher.
        self._lock = threading.RLock()

    def note_copy(self, nbytes: int, seconds: float, waited: float) -> None:
        """Counts the finished copy of a batch."""
        with self._lock:
            now = self.stats
            self.stats = replace(
                now,
                batches=now.batches + 1,
                bytes=now.bytes + nbytes,
                seconds=now.seconds + seconds,
                waited_seconds=now.waited_seconds + waited,
                note="",
            )

    def note_host(self) -> None:
        """Records that batches stay on the CPU, unless a batch has already been copied."""
        with self._lock:
            if not self.stats.batches:
                self.stats = replace(self.stats, note=_NO_COPIES)

    def note_pageable(self, why: str) -> bool:
        """Records why batches are not pinned. Returns True if the reason differs from the previous one."""
        with self._lock:
            is_new = self.stats.pageable != why
            self.stats = replace(self.stats, pageable=why)
            return is_new


_transfers: WeakTable[Transfers] = WeakTable()
find, keep = _transfers.find, _transfers.keep


def of(loader: LoaderLike) -> Transfers:
    """Returns the transfers of a loader. Creates them if there are none."""
    return find(loader) or keep(loader, Transfers())


def limit_texts(transfers: TransferStats, loop: float) -> tuple[str, str]:
    """Returns the sentence and the reason of a verdict that copies limit the loop.

    ``loop`` is the duration of the training loop in seconds, without the waits for first batches.
    """
    each, per_second = transfers.seconds / transfers.batches, transfers.bytes / transfers.seconds
    reason = f"the program's stream waits for copies for {transfers.waited_seconds / loop:.0%} of the loop's time; "
    reason += f"a batch of {size(round(transfers.bytes / transfers.batches))} takes {duration(each)} to copy, "
    reason += f"at {size(round(per_second))} per second"
    if transfers.pageable:
        return f"The copy to the device is the bottleneck: {transfers.pageable}.", reason
    sentence = "The copy to the device is the bottleneck: send fewer bytes, such as uint8 images that the device "
    sentence += "converts, or half precision; more workers do not help."
    return sentence, reason
