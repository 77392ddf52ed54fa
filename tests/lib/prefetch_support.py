"""Helpers for the tests of `prefetch_to_device`. The fixture `device` is in conftest.py."""

import torch
from support import rustloader


def prefetch(loader, **kw):
    return rustloader.prefetch_to_device(loader, **kw)


def tensors(count, start=0):
    return [torch.full((4,), start + k) for k in range(count)]
