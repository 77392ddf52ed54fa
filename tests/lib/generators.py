"""States and draws of the global random number generators of Python, NumPy and torch."""

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


def torch_states(generator=None):
    """The states of torch's generators alone, which takes less time."""
    return [it.get_state().numpy().tobytes() for it in (torch.default_generator, generator) if it is not None]


def drawn():
    """Draws one number from each generator, and reads the sample's seed."""
    return torch.rand(()).item(), random.random(), np.random.rand(), rustloader.sample_seed()
