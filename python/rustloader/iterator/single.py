"""What options change about torch's own iterator of the main process, for ``num_workers=0``."""

from __future__ import annotations

from typing import Any

from rustloader.fetch.inline import SeededFetcher
from rustloader.iterator import fetching, settings


def prepare(iterator: Any, loader: Any) -> None:
    """Sets up torch's iterator as the options of its loader ask for. Its class stays torch's."""
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    if fetcher is None:  # another package's iterator
        return
    seeding = fetching.seeding(settings.applied(loader), int(iterator._base_seed))
    if seeding is not None:
        iterator._dataset_fetcher = SeededFetcher(fetcher, iterator._dataset_kind, seeding)
        fetching.note_begun(loader, seeding)
