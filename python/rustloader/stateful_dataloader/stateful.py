"""The protocol of objects whose state can be saved and loaded."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and loaded: a dataset, a sampler, or an iterator over one.

    ``isinstance`` is true for every object that has both methods.

    Examples:
        >>> isinstance(rustloader.StatefulDataLoader(range(4)), rustloader.stateful_dataloader.Stateful)
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that ``state_dict`` returned."""
        ...
