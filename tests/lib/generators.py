"""What the global random number generators of Python, NumPy and torch hold, and draw."""

import random

import numpy as np
import torch
from support import rustloader


def main_state(generator=None):
    states = [
        hash(torch.get_rng_state().numpy().tobytes()),
        hash(random.getstate()),
        hash(np.random.get_state()[1].tobytes()),
    ]
    if generator is not None:
        states.append(hash(generator.get_state().numpy().tobytes()))
    return states


def drawn():
    """One number of each generator, and the seed."""
    return torch.rand(()).item(), random.random(), np.random.rand(), rustloader.sample_seed()
