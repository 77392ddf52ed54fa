"""Part 2 of the demo: promises that the demo checks on this machine."""

from __future__ import annotations

from collections.abc import Callable

import train_digits
from demo.settings import Settings

__all__ = ["PROMISES"]


def same_losses(settings: Settings) -> list[str]:
    """Trains a net through each loader. The losses of both runs must agree to the last bit."""
    training = train_digits.Settings(data=settings.data / "digits", epochs=settings.epochs, workers=settings.workers)
    theirs, ours = train_digits.train_with_both(training)
    train_digits.print_proof(theirs, ours)
    return train_digits.complaints(theirs, ours, training)


# Each function prints its evidence in a few lines, and returns a description of each broken promise.
# To add a promise, add a function and an entry here.
PROMISES: list[Callable[[Settings], list[str]]] = [same_losses]
