"""Helpers for the tests of `prefetch_to_device`. The fixture `device` is in conftest.py."""

from unittest import mock

import pytest
import torch
from support import rustloader


def on(device):
    """In the body of a ``with`` statement, every new prefetcher copies to this device."""
    return mock.patch("rustloader.device.prefetch.loader.streams_of", lambda asked: device)


def prefetch(loader, **kw):
    return rustloader.prefetch_to_device(loader, **kw)


def tensors(count, start=0):
    return [torch.full((4,), start + k) for k in range(count)]


def ends_with(text, iterator):
    with pytest.raises(RuntimeError, match=text):
        next(iterator)


class Raising:
    """Yields the given items, and raises those that are errors. Like torch's loaders, it goes on after an error."""

    def __init__(self, *items):
        self.items = list(items)

    def __iter__(self):
        return self

    def __next__(self):
        if not self.items:
            raise StopIteration
        item = self.items.pop(0)
        if isinstance(item, BaseException):
            raise item
        return item
