"""Short programs around a loader, for refusals.py. Each answers what it saw: "batches", or errors as texts."""

import os
import signal
import time

import torch
from sample_data import Dying, Images, Numbers, Slow
from support import DataLoader, same

# A batch of 4 images is larger than what lies in the message itself.
SIZE, BATCH = 24, 4


def want(dataset=None):
    return [x for x in torch.utils.data.DataLoader(dataset or Images(SIZE), batch_size=BATCH)]


def walk(loader, expected):
    """An epoch: texts of errors, each in its batch's place. A batch that is wrong, lost or doubled is told as such."""
    errors, place = [], 0
    try:
        iterator = iter(loader)
        kept = []
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                if errors and errors[-1] == text and place == last:
                    return [*errors, "for good"], kept
                errors.append(text)
                last = place
                if "Caught" in text:
                    place += 1
                    last = None
                continue
            if place >= len(expected) or not same(batch, expected[place]):
                return [*errors, f"wrong batch at {place}"], kept
            kept.append(batch)
            place += 1
        if place != len(expected):
            errors.append(f"{place} of {len(expected)} batches")
        return errors, kept
    except Exception as error:
        return [f"iter: {type(error).__name__}: {error}"], []


def plain():
    """Two epochs; the second one's workers are forked while the first one's batches are held."""
    expected = want()
    loader = DataLoader(Images(SIZE), batch_size=BATCH, num_workers=2)
    first, kept = walk(loader, expected)
    second, _ = walk(loader, expected)
    if not all(map(same, kept, expected)):
        second.append("a kept batch has changed")
    return [*first, *second]
